"""The bugs, put back: each of them must turn something red."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tests.chaos.mutants.edits import CodeEdit, LuaEdit, LuaText, Mutant, Replace, mutant
from usher.common.base.errors import ReplyUnknown
from usher.common.protocol.attempts import Attempts
from usher.common.redis.client import Link
from usher.consumer.execution.inbox_reader import InboxReader
from usher.consumer.lifecycle.owner_scripts import Buried, Letter, OwnerScripts
from usher.consumer.policy.quarantine import Left
from usher.master.dispatch.dispatcher import Dispatcher
from usher.master.dispatch.events import Report
from usher.master.leader.entries import NO_NEW_ENTRIES, NewEntries
from usher.master.leader.leader_scripts import LeaderScripts, Packet
from usher.master.policy.board.plans import HandOverPlan

# ---- functions that take the place of ours ----

_packet, _turn = LeaderScripts._packet, LeaderScripts.turn


def _without_index(steps: LeaderScripts, plan: HandOverPlan, *rest: Any) -> Packet:
    packet = _packet(steps, plan, *rest)
    return packet._replace(commands=[one for one in packet.commands if one[1] != steps._keys.tickets])


def _index_afterwards(
    steps: LeaderScripts,
    plan: HandOverPlan,
    new: NewEntries = NO_NEW_ENTRIES,
    count: int = 0,
    index: Mapping[bytes, bytes] = MappingProxyType({}),
) -> Any:
    answer = _turn(steps, plan, new, count, index)
    if answer is not None:
        for command in _packet(steps, plan, new, index, answer[0], True).commands:
            if command[1] == steps._keys.tickets:
                steps._link.call(*command)
    return answer


def _again(send: Any) -> Any:
    """The default of redis-py, here only once: it connects anew, sends again, and tells nobody. So a transaction
    goes over a connection that watches nothing."""

    def sent(link: Link, *commands: Any, **more: Any) -> Any:
        connections = link.connections
        try:
            return send(link, *commands, **more)
        except ReplyUnknown:
            reply = send(link, *commands, **more)
            link.connections = connections
            return reply

    return sent


call_again, pipeline_again = _again(Link.call), _again(Link.pipeline)


def _deliveries_are_attempts(reader: InboxReader, wanted: list[bytes]) -> dict[bytes, Attempts]:
    keys = reader._keys
    rows = reader._link.call("XPENDING", keys.stream, keys.group, "-", "+", 10_000, reader._incarnation)
    deliveries = {entry_id: count for entry_id, _, _, count in rows}
    return {entry_id: Attempts(*[deliveries.get(entry_id, 1) - 1] * 2) for entry_id in wanted}


def _ack_nothing(steps: OwnerScripts, ids: Sequence[bytes], *more: Any) -> None:
    pass


_take_events = Dispatcher._take_events


def _reports_acknowledge(dispatcher: Dispatcher) -> None:
    keys, link = dispatcher._keys, dispatcher._link
    for posted in list(dispatcher._events):
        if isinstance(posted, Report):
            for ticket, ids in posted.items:
                link.call("XACK", keys.stream, keys.group, *ids)
                link.call("HDEL", keys.tickets, ticket)
    _take_events(dispatcher)


def _letters_and_acks_apart(steps: OwnerScripts, letters: Sequence[Letter]) -> list[Buried | Exception]:
    answers: list[Buried | Exception] = []
    for letter in letters:
        try:
            answers.append(_letter_and_ack_apart(steps, letter))
        except ReplyUnknown as unknown:
            answers.append(unknown)
    return answers


def _letter_and_ack_apart(steps: OwnerScripts, letter: Letter) -> Buried:
    keys, link = steps._keys, steps.link
    fields = (
        "usher-id",
        letter.id,
        "usher-ticket",
        letter.ticket,
        "usher-reason",
        letter.reason,
        "usher-attempts",
        letter.attempts,
    )
    link.call("XADD", keys.dead, "*", *fields)
    steps.ack([letter.id])
    return Buried.OK


def _charged(left: Sequence[Left], is_explained: bool, *_: bool) -> list[tuple[Left, Attempts]]:
    return [(one, one.before._replace(crashes=one.before.crashes + 1).blamed()) for one in left]


# ---- the bugs ----

NO_ACK_CHECK = mutant(
    "no owner check in ack", LuaEdit("ack", "if redis.call('EXISTS', KEYS[2]) == 0 then return 'LOST' end", "")
)
NO_ACK_WATCH = mutant(
    "acknowledgements without a WATCH",
    CodeEdit(
        "usher.consumer.lifecycle.owner_scripts:OwnerScripts._acknowledge",
        '("WATCH", self._lease, keys.attempts)',
        '("SELECT", 0)',
    ),
)
_watching = LeaderScripts._watching.fget
NO_WATCH = Replace(
    "usher.master.leader.leader_scripts:LeaderScripts._watching",
    property(lambda steps: [("PING",), *_watching(steps)[1:]]),
)
NO_EPOCH = mutant(
    "no epoch check",
    LuaEdit("", "return held and string.sub(held, 1, #epoch + 1) == epoch .. ' '", "return true"),
    NO_WATCH,
)
BY_IDLE_TIME = mutant(
    "recovery by idle time",
    LuaText(
        "sweep",
        """-- sweep: whatever nobody has touched for a while
        local found = redis.call('XAUTOCLAIM', KEYS[1], ARGV[1], 'master', ARGV[3], ARGV[4], 'COUNT', ARGV[5], 'JUSTID')
        local strays = {}
        for _, id in ipairs(found[2]) do
          for _, value in ipairs({id, redis.call('XRANGE', KEYS[1], id, id)[1][2][2], ''}) do strays[#strays + 1] = value end
        end
        return {'OK', found[1], strays, {}}""",
    ),
)
READS_FIRST = mutant(
    "> before recovery", Replace("usher.master.recovery.repairs:Takeover._take_in_parked", lambda *_: None)
)
FREED_FIRST = mutant(
    "tickets of the dead are freed before they are taken back",
    CodeEdit(
        "usher.master.recovery.repairs:Recoverer.turn",
        "    page = steps.take_back(incarnation, PAGE)",
        """    if incarnation in board.consumers:
        return board.recovered(incarnation)
    page = steps.take_back(incarnation, PAGE)""",
    ),
)
RETRIES = mutant(
    "retries on",
    Replace("usher.common.redis.client:Link.call", call_again),
    Replace("usher.common.redis.client:Link.pipeline", pipeline_again),
)


@dataclass(frozen=True)
class Bug:
    """``story``: ``module:function``, the cheapest that it spoils. ``plan``: a chaos scenario that may show it, for the
    long run. ``also``: more of both; each story of them must notice it too."""

    mutant: Mutant
    story: str
    plan: str = ""
    also: tuple[str, ...] = ()

    @property
    def stories(self) -> tuple[str, ...]:
        return (self.story, *(name for name in self.also if ":" in name))

    @property
    def plans(self) -> tuple[str, ...]:
        return tuple(name for name in (self.plan, *self.also) if name and ":" not in name)

    @property
    def is_of_the_rig(self) -> bool:
        """Whether it is in what the tests themselves run."""
        return any(isinstance(edit, CodeEdit) and edit.target.startswith("tests.") for edit in self.mutant.edits)


_OWN = "tests.chaos.mutants.stories:"
_LEADER = "tests.integration.test_protocol_rules:"
_OWNER = "tests.integration.test_protocol_rules_owner:"
_RECALL = "tests.integration.test_recall_rules:"

BUGS = (
    Bug(
        NO_ACK_CHECK,
        _OWNER + "test_a_zombies_late_acknowledgement_does_not_end_its_successors_delivery",
        "K17d",
        (_OWNER + "test_an_incarnation_whose_lease_has_ended_acknowledges_nothing_also_before_it_is_recovered", "K3d"),
    ),
    Bug(NO_ACK_WATCH, _OWNER + "test_a_lease_that_has_ended_since_the_last_acknowledgement_acknowledges_nothing_more"),
    Bug(
        FREED_FIRST,
        _OWN + "what_a_dead_consumer_had_comes_before_what_waits_behind_it",
        "K2",
        (_OWN + "what_waits_for_room_stays_behind_what_its_dead_owner_had", "K20"),
    ),
    Bug(NO_EPOCH, _LEADER + "test_a_deposed_master_whose_hand_over_comes_late_takes_nothing", "K4"),
    Bug(
        mutant(
            "XCLAIM apart from the index",
            Replace("usher.master.leader.leader_scripts:LeaderScripts._packet", _without_index),
            Replace("usher.master.leader.leader_scripts:LeaderScripts.turn", _index_afterwards),
        ),
        _OWN + "index_and_pending_list_change_together",
        "K4",
    ),
    Bug(READS_FIRST, _LEADER + "test_a_new_leader_takes_in_what_the_last_one_had_read_before_it_reads_itself", "K4"),
    Bug(
        mutant(
            "cursor dropped",
            CodeEdit(
                "usher.master.recovery.repairs:IdleSweep.turn", "self._cursor = swept.cursor", "self._cursor = b'0-0'"
            ),
        ),
        _OWN + "the_sweep_gets_past_the_living",
    ),
    Bug(BY_IDLE_TIME, _LEADER + "test_the_sweep_leaves_a_living_owner_what_it_has_however_long_it_takes"),
    Bug(
        mutant(
            "plain INCR for fences and epochs",
            LuaEdit("", "math.max(last + 1, from_clock)", "last + 1"),
            Replace("usher.master.leader.leader_scripts:LeaderScripts._next_fence", lambda steps: steps._fence + 1),
        ),
        _OWN + "fences_survive_a_redis_that_lost_its_tail",
        "K8",
    ),
    Bug(
        mutant(
            "fence checked outside of the sink's transaction",
            CodeEdit("tests.chaos.rig.sink:Sink._commit", 'self._open(asked) == "fenced"', "False"),
        ),
        _OWN + "the_sink_judges_the_fence_in_its_own_transaction",
        "K3",
    ),
    Bug(
        mutant(
            "deliveries instead of attempts",
            Replace("usher.consumer.execution.inbox_reader:InboxReader._attempts", _deliveries_are_attempts),
            CodeEdit("usher.consumer.execution.inbox_reader:InboxReader._fill_lanes", "if self._tried", "if True"),
        ),
        _OWN + "neighbours_of_a_killer_are_not_charged",
        "K12",
    ),
    Bug(
        mutant(
            "the end of a consumer is charged to what ran in it",
            Replace("usher.consumer.lifecycle.process_ending:suspects", _charged),
        ),
        _OWN + "who_ran_when_its_consumer_ended_keeps_its_attempts",
        "K12",
    ),
    Bug(
        mutant(
            "a start is charged ahead of it",
            CodeEdit(
                "usher.consumer.isolation.worker:SuspectWorker._note_ahead",
                "crashes=known.crashes + 1",
                "failures=known.failures + 1",
            ),
        ),
        _OWN + "what_is_noted_ahead_of_a_start_is_no_failure",
        "K12",
    ),
    Bug(
        mutant(
            "a suspect runs beside the others",
            Replace("usher.consumer.execution.executor:is_suspect", lambda known: False),
        ),
        _OWN + "a_suspect_runs_apart_from_the_others",
        "K12n",
    ),
    Bug(
        mutant(
            "DELCONSUMER with pending entries",
            LuaEdit(
                "deregister",
                "if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) > 0 then return 'PENDING' end",
                "",
            ),
            CodeEdit("usher.master.recovery.repairs:Janitor._reap", "names.get(incarnation, 0) or ", ""),
        ),
        _OWN + "nobody_is_forgotten_who_still_has_something",
        "K2",
    ),
    Bug(
        mutant(
            "the HTTP report decides",
            Replace("usher.consumer.lifecycle.owner_scripts:OwnerScripts.ack", _ack_nothing),
            Replace("usher.master.dispatch.dispatcher:Dispatcher._take_events", _reports_acknowledge),
        ),
        _OWN + "a_lost_report_costs_only_speed",
        "K6",
    ),
    Bug(RETRIES, _LEADER + "test_entries_that_were_taken_by_a_call_whose_reply_was_lost_are_handed_over_first", "K5"),
    Bug(
        mutant(
            "trim by MAXLEN",
            CodeEdit("usher.consumer.execution.inbox_reader:InboxReader._ask", '"MINID", after(last)', '"MAXLEN", "1"'),
        ),
        _OWN + "the_inbox_is_trimmed_by_what_was_read",
        "K0",
    ),
    Bug(
        mutant("a give-back has no fence", LuaEdit("give_back", " or fence ~= ARGV[at + 1]", "")),
        _RECALL + "test_r1_a_call_that_is_sent_again_takes_nothing_that_came_back_meanwhile",
        "K22",
    ),
    Bug(
        mutant(
            "what is recalled stays queued until the answer",
            CodeEdit("usher.consumer.execution.lanes:Lanes._close", "if fences:", "if not fences:"),
        ),
        _RECALL + "test_a_recalled_ticket_goes_to_another_and_starts_there_only",
        "K22",
    ),
    Bug(
        mutant(
            "what waits is handed over at any time",
            CodeEdit(
                "usher.master.policy.board.board:Board._wake_due", "<= self._behind_ms + 1000 * now_s", "< math.inf"
            ),
        ),
        _OWN + "what_waits_is_handed_over_at_its_time",
    ),
    Bug(
        mutant(
            "group made again at $",
            CodeEdit(
                "usher.master.recovery.repairs:Takeover._ensure_group",
                "stream.create_group(start)",
                'stream.create_group(b"$")',
            ),
        ),
        _OWN + "a_group_that_is_made_again_goes_on_where_it_was",
        "K14g",
    ),
    Bug(
        mutant(
            "dead letter and XACK apart",
            Replace("usher.consumer.lifecycle.owner_scripts:OwnerScripts.dead_letters", _letters_and_acks_apart),
        ),
        _OWN + "a_dead_letter_and_its_message_are_never_both_there",
        "K5",
    ),
    Bug(
        mutant(
            "only a process itself sees that it stands still",
            CodeEdit("usher.common.http.serve:Pulse.last_update", "<= _WORD.unpack(word)[1]", "< math.inf"),
        ),
        _OWN + "what_is_silent_for_too_long_is_ended",
        "K12f",
    ),
)
