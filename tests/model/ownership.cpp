// Who owns which message: the leader's turn, the owner's scripts, `q:<ticket>` and `settle` as an explicit-state model.
//
// Every reachable state within the bounds is visited breadth first, so a trace that is printed is a shortest one.
// Read README.md beside this file first: it has the protocol as pseudo-code and says what is not modelled.
//
//   g++ -O2 -std=c++17 -DMESSAGES=3 -DINCARNATIONS=4 -o ownership ownership.cpp
//   ./ownership tickets=001 lost=1 crash=1 live           all rules on
//   ./ownership -POP_WITH_CLAIM tickets=00 lost=1         one rule off: prints a counter-example, exit code 1
//   ./ownership rules                                     the rules, with their numbers
//
// INCARNATIONS: 2 = two consumers, 4 = each may start once more. -DROLLBACK: Redis may lose the end of its log.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>
using std::string;
using std::to_string;
using std::vector;
typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;

#ifndef MESSAGES
#define MESSAGES 2
#endif
#ifndef INCARNATIONS
#define INCARNATIONS 2
#endif
const int N = MESSAGES, I = INCARNATIONS, T = 2, INBOX = 7, NOTES = 9;

// ---- the rules: number, name, what it says. `-NAME` switches one off. -------------------------------------------
#define RULES(X) \
  X(R1, WATCH_EPOCH, "a turn is an EXEC under a WATCH of `epoch`") \
  X(R2, LOOK_FIRST, "the answer to the last GET epoch is looked at before the next turn is sent") \
  X(R3, NEW_EPOCH, "a lost reply to a turn means a new epoch and a rebuild") \
  X(R3, SAME_CONNECTION, "a turn or acknowledgement goes out on the connection that set its WATCH") \
  X(R4, WATCH_FIRST, "a new leader sets its WATCH before it reads anything") \
  X(R5, READ_WITH_TURN, "the next XREADGROUP is in the turn's EXEC") \
  X(R5, TAKEN_WITH_TURN, "SET taken is in the turn's EXEC") \
  X(R5, RECORD_WITH_CLAIM, "the inbox record is in the EXEC of its XCLAIM") \
  X(R5, CLAIM_THE_REST, "what gets no owner in its turn is claimed by `master` in that turn") \
  X(R6, DROP_OLD, "ids up to `taken` that a read returns are dropped") \
  X(R7, REWIND, "a new leader sets the group back to `taken`") \
  X(R7, REWIND_BY_EPOCH, "the rewind checks the epoch") \
  X(R9, FENCE_STORED, "`taken` has the highest fence, and a new epoch begins above it") \
  X(R10, WATCH_ALIVE, "an acknowledgement is an EXEC under a WATCH of `alive:<incarnation>`") \
  X(R10, LOOK_ALIVE, "EXISTS alive, of the packet before, said 1") \
  X(R10, ALIVE_FIRST, "settle deletes `alive` of a dead owner before it moves anything of it") \
  X(R11, ASK_LOST_ACK, "after a lost acknowledgement its ids are asked for (XPENDING)") \
  X(R13, ALL_LISTS, "a new leader reads the pending lists of all names, dead ones too") \
  X(R13, WHOLE_TICKET, "a ticket of a dead owner stays shut until all that it had of it is moved") \
  X(R14, LEAVE_BODYLESS, "settle leaves an id without body and pending entry to its living owner") \
  X(R14, NOTE_WHAT_MOVED, "a note names only ids that are in the queue now, not those that were buried") \
  X(R14, NOTE_EMPTY, "a give back that finds nothing leaves its note all the same") \
  X(R14, GIVE_THE_REST, "a park letter whose own entry is gone gives the rest back") \
  X(R16, READ_EXCEPTIONS, "a new leader reads the exceptions (halted tickets)") \
  X(R17, WATCH_CHANGES, "a turn is an EXEC under a WATCH of `changes`") \
  X(R17, READ_CHANGES, "notes are applied before the next turn is planned") \
  X(R17, NOTE_GIVE_BACK, "give back leaves a note") \
  X(R17, NOTE_PARK, "a park letter leaves a note") \
  X(R17, NOTE_REDRIVE, "redrive leaves a note") \
  X(R17, HEAR_WHEN_IDLE, "an idle leader hears `changes`") \
  X(R18, CLAIM_ONLY_NAMED, "settle claims what is not pending only if a queue or an exception names it") \
  X(R19, ASK_LOST_REPORTS, "the leader asks settle for what nobody reported") \
  X(R20, QUIET_FIRST, "a ticket is given back only when nothing of it runs or waits for its acknowledgement") \
  X(R20, UNTIL_SURE, "give back is sent until its answer is known") \
  X(R20, ONCE, "the owner's calls are numbered, and each runs once") \
  X(R20, HOLD, "nothing of the ticket starts while a call for it is under way") \
  X(R20, DROP_CLOSED, "after the answer, records with a fence <= F are dropped when they are read") \
  X(R20, GIVE_UNREAD, "the script adds what the caller's inbox still has of the ticket") \
  X(R21, STAND_STILL, "the inbox is not read while a call is under way") \
  X(R22, ALL_START_OVER, "when Redis went back, every incarnation starts over") \
  X(R22, REPORT_BY_RECORD, "a report frees only what this epoch handed over; of the rest it is a question for settle") \
  X(R23, TRIM_BY_TAKEN, "trimming stops at `taken`, not at last-delivered") \
  X(R24, PUSH_WITH_CLAIM, "RPUSH q:<ticket> is in the EXEC that claims for `master`") \
  X(R24, POP_WITH_CLAIM, "LPOP q:<ticket> is in the EXEC that claims for the owner") \
  X(R24, GIVE_BACK_QUEUES, "give back and park letter queue in the script that claims for `master`") \
  X(R25, GIVE_BACK_IN_FRONT, "give back and park letter push at the front") \
  X(R25, SETTLE_IN_PLACE, "settle inserts by id") \
  X(R26, CLAIM_QUEUED_BY_FORCE, "what the turn pops from a queue it claims with FORCE") \
  X(R27, READ_BOTH, "a new leader compares the queues with the pending list of `master`") \
  X(R27, SHUT_IN_DOUBT, "a ticket where they differ stays shut until its settle has been heard") \
  X(R28, SETTLE_DEAD_ONLY, "settle takes from owners without a lease only, however idle the entry") \
  X(R28, SETTLE_BY_EPOCH, "(a second lock) settle checks the epoch") \
  X(R29, SETTLE_NOTES, "settle's answer reaches the leader as a note in `changes`, in its place") \
  X(R29, SETTLE_ANSWERS_ALL, "(a second lock) the note has a word on every id that was asked for, not only on those that moved") \
  X(R30, EXCEPTION_STANDS, "settle halts again what is under `halted` without an exception, or the reverse") \
  X(R30, SETTLE_UP_TO_TAKEN, "settle and redrive leave ids above `taken` alone: they will be read") \
  X(R31, NOTE_DRAIN, "(speed) drain and deregister leave a note") \
  X(R31, NOTE_REGISTER, "(speed) register leaves a note") \
  X(R31, EXPIRY_ABORTS, "(not needed) the end of the leader's lease aborts its EXEC")
enum {
#define X(number, name, text) i_##name,
  RULES(X)
#undef X
  RULE_COUNT
};
#define X(number, name, text) const u64 name = 1ull << i_##name;
RULES(X)
#undef X
static const char* RULE_NAMES[] = {
#define X(number, name, text) #name,
    RULES(X)
#undef X
};
static const char* RULE_TEXTS[] = {
#define X(number, name, text) #number " " #name ": " text,
    RULES(X)
#undef X
};
static_assert(RULE_COUNT <= 64, "one bit each");
static u64 rules = ~0ull;
static bool on(u64 rule) { return rules & rule; }

// ---- bounds ------------------------------------------------------------------------------------------------------
enum { CRASH, EXPIRE, LOST, LEADER, DRAIN, RECALL, PARK, SKIP, DELETE, SETID, DELQ, DELEXC, DELNAME, STRAY, TRIM, GROUP, ROLL, FAULTS };
static const char* FAULT_NAMES[] = {"crash", "expire", "lost",  "leader", "drain",     "recall", "park", "skip",
                                    "delete", "setid",  "delq", "delexc", "delname", "stray", "trim", "group", "roll"};
static int budget[FAULTS];
static int ticket_of[8] = {0, 0, 1, 0, 0, 0, 0, 0};
static int window = 2;
static bool doorbell = false, pages = false, strict = false, loose = false, redis6 = false, eager = false, liveness = false;

// ---- the state -----------------------------------------------------------------------------------------------------
const u8 NONE = 0xff;
const u8 FREE = 0, MASTER = 1, HALTED = 2, OWNER = 3, STRANGER = OWNER + I;  // who has an entry pending
const u8 NO_LEASE = 0, LIVE = 1, DEAD = 2, DRAINING = 3;
const u8 HANDED = 1, RECALLED = 2;                                           // kinds of inbox records
const u8 TURN = 1, ASK_BACK = 2;                                             // kinds of packets
const u8 GAVE_BACK = 1, PARKED = 2, SETTLED = 3, LEAVES = 4, JOINED = 5;     // kinds of notes
const u8 GIVE_BACK = 1, PARK_LETTER = 2, SKIP_LETTER = 3;                    // kinds of owner's calls
const u8 GIVEN = 1, LOST_LEASE = 3, GONE = 4;                                // their answers
const u8 ELECT = 0, BEGIN = 1, READ_1 = 2, READ_2 = 3, REWINDING = 4, LEADS = 5;  // what a leader is at

#pragma pack(push, 1)
struct Record { u8 kind, ids, fence; };  // of a recall, ids is the ticket
struct Note { u8 kind, who, ticket, waits, over, fence; };  // of SETTLED, fence is 1 if the ticket is halted
struct Packet { u8 kind, to[T], ids[T], fence, rest, fresh, taken, count, dirty, executed, ok, got; };
struct Settle { u8 sent, epoch, ticket, ids, owner, running, said, waits, over, halted; };  // sent: 2 executed, unheard
struct Ack { u8 ids, state, dirty; };  // state: 1 sent, 2 executed, 3 nil, 4 lost
struct Call { u8 state, kind, ticket, fence, id, ids, answer; };
struct Leader {
  u8 up, epoch, at, owner[T], fence[T], running, handed, waiting, batch, halted, doubt, shut, next_fence, recalled;
  u8 dirty, heard_epoch, heard_changes, known_changes;  // heard_epoch: 0 another's, 1 mine, 2 not asked yet
  u8 noted, note_count;
  Note note[NOTES];
  u8 saw_list[N], saw_queue, saw_halted;
  Packet packet;
};
struct Consumer { u8 process, known, ended, fence[N], runs[T], closed[T], drains, dirty, looked, reported; Ack ack; Call call; };
struct Redis {
  u8 delivered, taken, top_fence, pending[N], done, gone, lease[I], no_alive;
  u8 queued[T], queue[T][N], exception[T], inbox_count[I];
  Record inbox[I][INBOX];
};
struct State {
  Redis r;
  u8 epoch, lease_of, changes, ran, ran_fence[I];
  Leader m[2];
  Packet late[2];
  Settle settle, late_settle;
  Consumer c[I];
  Ack late_ack[I];
  Call late_call[I];
  u8 best_fence[T], best_owner[T], left[FAULTS];
#ifdef ROLLBACK
  u8 has_disk;
  Redis disk;
#endif
};
#pragma pack(pop)

// ---- the search ----------------------------------------------------------------------------------------------------
struct Step { u8 what, a, b; };
static vector<State> states;
static vector<u32> parent, table, edge_from, edge_to;
static vector<Step> how;
static u32 table_mask, current, violated_at;
static string violation;
static Step violating;
static u64 edges, tolerated;
static bool faulty;  // the step under way is a fault

static u64 hash_of(const State& s) {
  const u8* p = (const u8*)&s;
  u64 h = 1469598103934665603ull;
  size_t i = 0;
  for (; i + 8 <= sizeof(State); i += 8) {
    u64 v;
    memcpy(&v, p + i, 8);
    h = (h ^ v) * 0x9E3779B97F4A7C15ull;
    h ^= h >> 29;
  }
  for (; i < sizeof(State); i++) h = (h ^ p[i]) * 1099511628211ull;
  h ^= h >> 32;
  h *= 0xD6E8FEB86659FD93ull;
  return h ^ (h >> 32);
}
static void grow_table() {
  table_mask = table_mask * 2 + 1;
  table.assign((size_t)table_mask + 1, 0);
  for (u32 i = 0; i < states.size(); i++) {
    u32 k = hash_of(states[i]) & table_mask;
    while (table[k]) k = (k + 1) & table_mask;
    table[k] = i + 1;
  }
}
static void keep(const State& n, Step step) {
  edges++;
  u32 k = hash_of(n) & table_mask;
  while (table[k] && memcmp(&states[table[k] - 1], &n, sizeof(State))) k = (k + 1) & table_mask;
  if (!table[k]) {
    states.push_back(n);
    parent.push_back(current);
    how.push_back(step);
    table[k] = states.size();
    if (liveness && !faulty) edge_from.push_back(current), edge_to.push_back(states.size() - 1);
    if (states.size() * 2 > table_mask) grow_table();
  } else if (liveness && !faulty) {
    edge_from.push_back(current), edge_to.push_back(table[k] - 1);
  }
}
static void violate(const string& what, Step step) {
  if (violation.empty()) violation = what, violated_at = current, violating = step;
}

// ---- small helpers ---------------------------------------------------------------------------------------------------
static bool has(u8 set, int e) { return set >> e & 1; }
static int lowest(u8 set) { return __builtin_ctz(set); }
static int size(u8 set) { return __builtin_popcount(set); }
static u8 ids_of(int t) {
  u8 set = 0;
  for (int e = 0; e < N; e++)
    if (ticket_of[e] == t) set |= 1 << e;
  return set;
}
static u8 below(int n) { return (u8)((1 << n) - 1); }
static string id(int e) { return "T" + to_string(ticket_of[e]) + ":e" + to_string(e + 1); }
static string inc(int i) { return i == NONE ? "nobody" : "c" + to_string(i & 1) + (i > 1 ? "'" : ""); }
static string ids(u8 set) {
  string text = "{";
  for (int e = 0; e < N; e++)
    if (has(set, e)) text += (text.size() > 1 ? "," : "") + id(e);
  return text + "}";
}
static bool live(const Redis& r, int i) { return i < I && (r.lease[i] == LIVE || r.lease[i] == DRAINING); }
static u8 queue_set(const Redis& r, int t) {
  u8 set = 0;
  for (int k = 0; k < r.queued[t]; k++) set |= 1 << r.queue[t][k];
  return set;
}
static void queue_insert(Redis& r, int t, int at, int e) {
  if (r.queued[t] >= N) return violate("QUEUE FULL: an id is queued twice", {});
  for (int k = r.queued[t]; k > at; k--) r.queue[t][k] = r.queue[t][k - 1];
  r.queue[t][at] = e;
  r.queued[t]++;
}
static void queue_remove(Redis& r, int t, int e) {
  int kept = 0;
  for (int k = 0; k < r.queued[t]; k++)
    if (r.queue[t][k] != e) r.queue[t][kept++] = r.queue[t][k];
  for (int k = kept; k < r.queued[t]; k++) r.queue[t][k] = 0;
  r.queued[t] = kept;
}
static void queue_pop(Redis& r, int t, int count) {
  while (count-- && r.queued[t]) {
    for (int k = 1; k < r.queued[t]; k++) r.queue[t][k - 1] = r.queue[t][k];
    r.queue[t][--r.queued[t]] = 0;
  }
}
static void inbox_add(Redis& r, int i, Record record) {
  if (r.inbox_count[i] >= INBOX) fprintf(stderr, "inbox full\n"), exit(2);
  r.inbox[i][r.inbox_count[i]++] = record;
}
static void inbox_drop(Redis& r, int i, int k) {
  for (int j = k + 1; j < r.inbox_count[i]; j++) r.inbox[i][j - 1] = r.inbox[i][j];
  memset(&r.inbox[i][--r.inbox_count[i]], 0, sizeof(Record));
}
static void inbox_clear(Redis& r, int i) {
  r.inbox_count[i] = 0;
  memset(r.inbox[i], 0, sizeof r.inbox[i]);
}
static u8 in_inbox(const Redis& r, int i) {
  u8 set = 0;
  for (int k = 0; k < r.inbox_count[i]; k++)
    if (r.inbox[i][k].kind == HANDED) set |= r.inbox[i][k].ids;
  return set;
}
static void forget(Leader& m) {  // a leader's memory goes; its process and its connection stay
  u8 up = m.up, epoch = m.epoch, dirty = m.dirty;
  memset(&m, 0, sizeof m);
  m.up = up, m.epoch = epoch, m.dirty = dirty;
  memset(m.owner, NONE, T);
}
static void release(Leader& m, int t) {
  m.owner[t] = NONE, m.fence[t] = 0, m.recalled &= ~(1 << t);
}
static void end_process(State& s, int i) {  // what it had sent may still arrive
  Consumer& c = s.c[i];
  if (c.ack.state == 1 && !s.late_ack[i].state) s.late_ack[i] = c.ack, s.late_ack[i].dirty = c.dirty;
  if (c.call.state == 1 && !s.late_call[i].state) s.late_call[i] = c.call;
  memset(&c, 0, sizeof c);
  c.process = 2;
  memset(c.runs, NONE, T);
}

// ---- traces ----------------------------------------------------------------------------------------------------------
#define STEPS(X) \
  X(START_OF_ALL, "start") X(ELECTED, "is elected: new epoch") X(WATCHES, "WATCH epoch, changes; GET epoch") \
  X(READS_1, "rebuild reads (1)") X(READS_2, "rebuild reads (2)") X(REWINDS, "rewinds the group to taken") \
  X(SENDS, "sends") X(EXECUTED, "EXEC:") X(REPLY, "reply") X(REPLY_LOST, "reply, or the packet, is lost") \
  X(LATE_PACKET, "a late packet is executed:") X(NEVER, "what was late never arrives") X(FENCED, "sees that it is fenced") \
  X(SENDS_SETTLE, "sends settle") X(SETTLE_RUNS, "settle is executed:") X(SETTLE_VANISHES, "settle never arrives") \
  X(SETTLE_LOST, "settle's connection is lost") \
  X(SETTLE_REPLY, "settle's reply:") \
  X(REPORT, "hears by HTTP of") X(LEASE_OF_LEADER_ENDS, "leader's lease ends") X(LEADER_CRASHES, "leader crashes") \
  X(LEADER_STARTS, "master restarts") X(REGISTERS, "registers") X(CRASHES, "crashes") X(LEASE_ENDS, "its lease ends") \
  X(EXITS, "exits") X(READS_RECORD, "reads record") X(PASSES_OVER, "passes over a recall") X(STARTS, "STARTS") \
  X(RETURNS, "handler returned") X(SENDS_ACK, "sends ack") X(ACKED, "ack executed") X(ACK_REPLY, "ack's reply") \
  X(ACK_LOST, "ack's reply or connection is lost") X(LATE_ACK, "a late ack is executed") \
  X(CALLS, "calls the script") X(CALL_RUNS, "script executed") X(CALL_REPLY, "script's reply") \
  X(CALL_LOST, "script's reply or connection is lost") X(LATE_CALL, "a late script call is executed") \
  X(DRAINS, "drains") X(DEREGISTERS, "deregisters") X(REDRIVEN, "an operator redrives") X(DELETED, "a producer XDELs") \
  X(DROPPED, "renew: no body, Redis drops the pending entry") X(TAKEN_SET, "SET taken, apart") X(PUSHED, "RPUSH, apart") \
  X(SETID_BACK, "an operator sets the group back") X(REPORTS_LOST, "its reports are lost") X(HEARS, "the doorbell brings") \
  X(ON_DISK, "Redis: what is on disk now") X(WENT_BACK, "Redis LOSES THE END OF ITS LOG") X(APPLIES, "applies notes") \
  X(QUEUE_LOST, "an operator deletes the queue of") X(EXCEPTION_LOST, "an operator deletes the exception of") \
  X(CLAIMED_AWAY, "an operator claims for a name that is nobody's:") \
  X(NAME_DELETED, "an operator deletes `master` or `halted` from the group, with") \
  X(TRIMS, "the stream is trimmed up to") X(GROUP_LOST, "the group is lost and made again at")
enum {
#define X(name, text) s_##name,
  STEPS(X)
#undef X
};
static const char* STEP_TEXTS[] = {
#define X(name, text) text,
    STEPS(X)
#undef X
};
static string memory(const Leader& m) {
  string text;
  for (int t = 0; t < T; t++)
    if (m.owner[t] != NONE) text += "T" + to_string(t) + " at " + inc(m.owner[t]) + ", ";
  text += "running " + ids(m.running) + ", waiting " + ids(m.waiting) + ", new " + ids(m.batch);
  if (m.halted) text += ", halted";
  if (m.doubt) text += ", in doubt";
  return text;
}
static string packet_text(const Packet& p) {
  if (p.kind == ASK_BACK) return "recall of T" + to_string(p.ids[0]) + " -> " + inc(p.to[0]);
  string text;
  for (int t = 0; t < T; t++)
    if (p.ids[t]) text += ids(p.ids[t]) + " -> " + inc(p.to[t]) + " f" + to_string(p.fence) + "; ";
  if (p.rest) text += ids(p.rest) + " -> master; ";
  return text + "taken=" + to_string(p.taken) + "; read " + to_string(p.count);
}
static string call_text(const Call& c) {
  static const char* kinds[] = {"", "give back", "park letter", "skip letter"};
  static const char* answers[] = {"", "GIVEN", "", "LOST", "GONE"};
  return string(kinds[c.kind]) + " T" + to_string(c.ticket) + " " + answers[c.answer];
}
static void print_step(Step step, const State& s) {
  string text;
  string who = step.a == NONE ? "" : inc(step.a);
  switch (step.what) {
    case s_ELECTED: case s_WATCHES: case s_READS_1: case s_REPLY: case s_REPLY_LOST: case s_FENCED: case s_TAKEN_SET:
    case s_LEASE_OF_LEADER_ENDS: case s_LEADER_CRASHES: case s_LEADER_STARTS: case s_SETTLE_VANISHES: case s_PUSHED:
      who = "M" + to_string(step.a);
      break;
    case s_READS_2: case s_REWINDS: case s_APPLIES:
      who = "M" + to_string(step.a), text = memory(s.m[step.a]);
      break;
    case s_SENDS:
      who = "M" + to_string(step.a), text = packet_text(s.m[step.a].packet);
      break;
    case s_EXECUTED:
      who = "M" + to_string(step.a), text = s.m[step.a].packet.ok ? "done" : "nil";
      if (s.m[step.a].packet.got) text += ", read " + ids(s.m[step.a].packet.got);
      break;
    case s_SENDS_SETTLE:
      who = "M" + to_string(step.a);
      text = "(T" + to_string(s.settle.ticket) + ", " + ids(s.settle.ids) + ")";
      break;
    case s_SETTLE_RUNS: case s_SETTLE_REPLY: who = "", text = "waits " + ids(step.a) + ", over " + ids(step.b); break;
    case s_REPORT: case s_HEARS: who = "M" + to_string(step.a), text = ids(step.b); break;
    case s_LATE_PACKET: who = "", text = step.b ? "done" : "nil"; break;
    case s_READS_RECORD: case s_SENDS_ACK: case s_ACKED: case s_ACK_REPLY: case s_LATE_ACK:
      text = ids(step.b & 31) + (step.b & 128 ? " nil" : "");
      break;
    case s_STARTS: case s_RETURNS: case s_REDRIVEN: case s_CLAIMED_AWAY: case s_DELETED: case s_DROPPED: text = id(step.b); break;
    case s_CALLS: case s_CALL_RUNS: text = call_text(s.c[step.a].call); break;
    case s_CALL_REPLY: text = string(step.b == GIVEN ? "GIVEN" : step.b == GONE ? "GONE" : "LOST"); break;
    case s_NAME_DELETED: text = ids(step.b); break;
    case s_QUEUE_LOST: case s_EXCEPTION_LOST: who = "", text = "T" + to_string(step.b); break;
    case s_TRIMS: case s_GROUP_LOST: case s_SETID_BACK: who = "", text = to_string(step.b) + " messages"; break;
    case s_START_OF_ALL: case s_NEVER: case s_ON_DISK: case s_WENT_BACK: who = ""; break;
  }
  printf("%s %s %s\n", who.c_str(), STEP_TEXTS[step.what], text.c_str());
}
static void print_trace(u32 at) {
  vector<u32> path;
  for (u32 i = at; i; i = parent[i]) path.push_back(i);
  for (size_t k = path.size(); k--;) {
    printf("%4zu ", path.size() - k);
    print_step(how[path[k]], states[path[k]]);
  }
}

// ---- equal states are one state: fences, epochs and positions count by their order only --------------------------------
static void rank(const vector<u8*>& values) {
  u8 used[256] = {0}, to[256] = {0};
  for (u8* p : values) used[*p] = 1;
  for (int k = 1, next = 0; k < 256; k++)
    if (used[k]) to[k] = ++next;
  for (u8* p : values) *p = to[*p];
}
static u8 held(const Consumer& c) {
  u8 set = c.known | c.ended | c.ack.ids;
  for (int t = 0; t < T; t++)
    if (c.runs[t] != NONE) set |= 1 << c.runs[t];
  return set;
}
// A deposed leader whose WATCH is dirty, a late packet or acknowledgement whose WATCH is dirty, a late call of an owner
// without a lease: none of these does anything more. They are dropped at once (`all` explores their steps too).
static bool everything = false;
static void drop_the_harmless(State& s) {
  const u64 needed = WATCH_EPOCH | WATCH_CHANGES | LOOK_FIRST | SAME_CONNECTION | READ_WITH_TURN;
  if (everything || (rules & needed) != needed) return;
  for (int x = 0; x < 2; x++) {
    Leader& m = s.m[x];
    if (s.late[x].kind && s.late[x].dirty) memset(&s.late[x], 0, sizeof(Packet));
    if (m.epoch && m.epoch != s.epoch && m.at == LEADS && m.dirty && m.heard_epoch != 2) m.epoch = 0, forget(m);
  }
  for (int i = 0; i < I; i++) {
    if (s.late_ack[i].state && s.late_ack[i].dirty) memset(&s.late_ack[i], 0, sizeof(Ack));
    if (s.late_call[i].state && !live(s.r, i)) memset(&s.late_call[i], 0, sizeof(Call));
  }
  if (!s.late[0].kind && s.late[1].kind) s.late[0] = s.late[1], memset(&s.late[1], 0, sizeof(Packet));
}
static void normalise(State& s) {
  drop_the_harmless(s);
  for (Leader& m : s.m) m.handed &= m.running;
  bool packets = s.m[0].packet.kind || s.m[1].packet.kind || s.late[0].kind || s.late[1].kind;
  for (int i = 0; i < I; i++) {
    Consumer& c = s.c[i];
    for (int e = 0; e < N; e++)
      if (!has(held(c), e)) c.fence[e] = 0;
    if (c.call.state || s.late_call[i].state) continue;
    s.ran |= 1 << i, s.ran_fence[i] = 0;
    for (int t = 0; t < T; t++)
      if (!packets && !(in_inbox(s.r, i) & ids_of(t))) c.closed[t] = 0;
  }
  for (Settle* q : {&s.settle, &s.late_settle})
    if (on(SETTLE_BY_EPOCH) && q->epoch != s.epoch) memset(q, 0, sizeof *q);  // it is refused
  vector<u8*> fences = {&s.r.top_fence};
  for (int t = 0; t < T; t++) fences.push_back(&s.best_fence[t]);
  for (int x = 0; x < 2; x++) {
    Leader& m = s.m[x];
    for (int k = 0; k < m.note_count; k++)
      if (m.note[k].kind != SETTLED) fences.push_back(&m.note[k].fence);
    for (int t = 0; t < T; t++) {
      if (m.owner[t] == NONE) m.fence[t] = 0;
      fences.push_back(&m.fence[t]);
    }
    fences.insert(fences.end(), {&m.next_fence, &m.packet.fence, &s.late[x].fence});
  }
  for (int i = 0; i < I; i++) {
    for (int k = 0; k < s.r.inbox_count[i]; k++) fences.push_back(&s.r.inbox[i][k].fence);
    for (int e = 0; e < N; e++) fences.push_back(&s.c[i].fence[e]);
    for (int t = 0; t < T; t++) fences.push_back(&s.c[i].closed[t]);
    fences.insert(fences.end(), {&s.c[i].call.fence, &s.late_call[i].fence, &s.ran_fence[i]});
  }
#ifdef ROLLBACK
  for (int i = 0; i < I; i++)
    for (int k = 0; k < s.disk.inbox_count[i]; k++) fences.push_back(&s.disk.inbox[i][k].fence);
#endif
  rank(fences);
  rank({&s.changes, &s.m[0].known_changes, &s.m[0].heard_changes, &s.m[1].known_changes, &s.m[1].heard_changes});
  rank({&s.epoch, &s.m[0].epoch, &s.m[1].epoch, &s.settle.epoch, &s.late_settle.epoch});
}

// ---- what must hold in every state ---------------------------------------------------------------------------------------
static void check(const State& s, Step step) {
  const Redis& r = s.r;
  u8 named = 0;
  for (int t = 0; t < T; t++) {
    u8 queue = queue_set(r, t);
    named |= queue;
    if (r.exception[t]) named |= 1 << (r.exception[t] - 1);
    for (int k = 1; k < r.queued[t] && !loose; k++)
      if (r.queue[t][k - 1] >= r.queue[t][k]) violate("QUEUE ORDER: q:T" + to_string(t) + " is not in id order", step);
    if (queue & r.done && !loose) violate("QUEUE: q:T" + to_string(t) + " names " + ids(queue & r.done) + ", which is over", step);
  }
  for (int e = 0; e < N; e++) {
    if (has(r.done, e) || has(r.gone, e)) continue;
    if (r.pending[e] == FREE && e < r.taken && !has(named, e))
      violate("LOST: " + id(e) + " is pending for nobody, in no queue, below taken, and not done", step);
    if (rules != ~0ull || budget[DELQ] || budget[DELEXC] || budget[DELNAME] || budget[STRAY] || budget[GROUP]) continue;
    bool queued = has(queue_set(r, ticket_of[e]), e), halts = r.exception[ticket_of[e]] == e + 1;
    if (queued != (r.pending[e] == MASTER)) violate("TWO TRUTHS: queue and pending list differ on " + id(e), step);
    if (halts != (r.pending[e] == HALTED)) violate("TWO TRUTHS: exception and pending list differ on " + id(e), step);
  }
}
static void emit(State n, int what, int a, int b) {
  Step step = {(u8)what, (u8)a, (u8)b};
  normalise(n);
  check(n, step);
  keep(n, step);
}
static void emit_fault(State& n, int fault, int what, int a, int b) {
  n.left[fault]--;
  faulty = true;
  emit(n, what, a, b);
  faulty = false;
}
static void check_start(const State& s, int i, int e) {
  int t = ticket_of[e];
  const Redis& r = s.r;
  Step step = {s_STARTS, (u8)i, (u8)e};
  bool living = live(r, i);
  u8 f = s.c[i].fence[e];
  bool excused = has(r.gone, e) && !strict;  // README, "What stays open"
  for (int j = 0; j < I; j++) {
    const Consumer& other = s.c[j];
    if (j == i || other.process != 1 || other.runs[t] == NONE) continue;
    if (other.call.state && other.call.kind != GIVE_BACK && other.call.ticket == t) continue;
    int o = other.runs[t];
    if (living && live(r, j)) {
      if (excused || (has(r.gone, o) && !strict)) tolerated++;
      else violate("OVERLAP: " + id(e) + " starts on " + inc(i) + " while " + id(o) + " runs on " + inc(j), step);
    } else if (living && other.fence[o] >= f && !excused) {
      violate("FENCE: a stale execution that overlaps has a fence as high as the living one's", step);
    }
  }
  if (!living || excused) return;
  for (int d = 0; d < N; d++) {
    if (ticket_of[d] != t || d == e || has(r.gone, d)) continue;
    if (d > e && has(r.done, d)) violate("ORDER: " + id(e) + " runs after the later " + id(d) + " was acknowledged", step);
    if (d > e) continue;
    if (!has(r.done, d) && !has(s.c[i].ended, d))
      violate(r.pending[d] == HALTED ? "HALTED: " + id(e) + " starts although its ticket waits for an operator"
                                     : "ORDER: " + id(e) + " starts although " + id(d) + " is not finished", step);
    for (int j = 0; j < I; j++)
      if (j != i && s.c[j].process == 1 && live(r, j) && has(s.c[j].ended, d) && !has(r.done, d))
        violate("ORDER: " + id(e) + " starts while the end of " + id(d) + " is not acknowledged", step);
  }
  if (has(r.done, e)) violate("REPEAT: " + id(e) + " starts after it was acknowledged", step);
  else if (r.pending[e] != OWNER + i && !has(r.gone, e))
    violate("NOT ITS OWN: a living incarnation starts " + id(e) + ", which is not pending for it", step);
  if (f < s.best_fence[t]) violate("FENCE falls on T" + to_string(t), step);
  else if (f == s.best_fence[t] && s.best_owner[t] != i && f) violate("FENCE: two owners have one", step);
}
static bool over(const State& s, int e) {
  if (has(s.r.done, e)) return true;
  if (!has(s.r.gone, e) || s.r.pending[e]) return false;
  for (int i = 0; i < I; i++)
    if (s.c[i].process == 1 && has(held(s.c[i]) | in_inbox(s.r, i), e)) return false;
  return true;
}
static bool all_done(const State& s) {
  for (int e = 0; e < N; e++)
    if (!over(s, e)) return false;
  if (s.r.delivered < N || s.lease_of == NONE || s.r.queued[0] || s.r.queued[1]) return false;
  const Leader& m = s.m[s.lease_of];
  return m.up && m.epoch == s.epoch && m.at == LEADS && !m.waiting && !m.batch && !m.packet.kind && !m.running && !m.doubt;
}

// ---- Redis ---------------------------------------------------------------------------------------------------------------
static void epoch_changes(State& s) {
  if (!on(WATCH_EPOCH)) return;
  for (int x = 0; x < 2; x++) s.m[x].dirty = 1, s.late[x].dirty |= s.late[x].kind != 0;
}
static void leave_note(State& s, u64 rule, Note note) {  // XADD changes
  if (!on(rule)) return;
  s.changes++;
  for (int x = 0; x < 2; x++) {
    Leader& m = s.m[x];
    if (m.at == ELECT || m.heard_epoch == 2) continue;
    if (m.epoch != s.epoch && on(LOOK_FIRST)) continue;  // it will forget everything before it applies a note
    if (m.note_count >= NOTES) fprintf(stderr, "changes full\n"), exit(2);
    m.note[m.note_count++] = note;
  }
  if (!on(WATCH_CHANGES)) return;
  for (int x = 0; x < 2; x++) s.m[x].dirty = 1, s.late[x].dirty |= s.late[x].kind != 0;
}
static void delete_alive(State& s, int i) {
  if (has(s.r.no_alive, i)) return;
  s.r.no_alive |= 1 << i;
  if (!on(WATCH_ALIVE)) return;
  s.c[i].dirty = 1;
  if (s.late_ack[i].state) s.late_ack[i].dirty = 1;
}
static void claim(Redis& r, int e, u8 who, bool force) {  // XCLAIM
  if (has(r.gone, e)) {                                    // FORCE makes nothing without a body
    r.pending[e] = redis6 && r.pending[e] != FREE ? who : FREE;
    return;
  }
  if (r.pending[e] == FREE && !force) return;
  r.pending[e] = who;
  r.done &= ~(1 << e);  // FORCE brings an acknowledged entry back
}
static void push_rest(Redis& r, u8 rest) {
  for (int e = 0; e < N; e++)
    if (has(rest, e)) queue_insert(r, ticket_of[e], r.queued[ticket_of[e]], e);
}
static bool execute(State& s, Packet& p, bool dirty) {  // MULTI ... EXEC of a leader
  Redis& r = s.r;
  p.ok = !dirty, p.got = 0;
  auto read = [&] {
    for (int k = 0; k < p.count && r.delivered < N; k++, r.delivered++)
      if (!has(r.gone, r.delivered)) p.got |= 1 << r.delivered;
  };
  if (!p.ok) {
    if (!on(READ_WITH_TURN) && p.kind == TURN) read();
    return false;
  }
  if (p.kind == ASK_BACK) {
    inbox_add(r, p.to[0], {RECALLED, p.ids[0], 0});
    return true;
  }
  for (int i = 0; i < I; i++) {
    Record record = {HANDED, 0, p.fence};
    for (int t = 0; t < T; t++) {
      if (!p.ids[t] || p.to[t] != i) continue;
      record.ids |= p.ids[t];
      for (int e = 0; e < N; e++)
        if (has(p.ids[t], e)) claim(r, e, OWNER + i, has(p.fresh, e) || on(CLAIM_QUEUED_BY_FORCE));
      if (on(POP_WITH_CLAIM)) queue_pop(r, t, size(p.ids[t] & ~p.fresh));
    }
    if (record.ids && on(RECORD_WITH_CLAIM)) inbox_add(r, i, record);
    if (record.ids && on(FENCE_STORED) && p.fence > r.top_fence) r.top_fence = p.fence;
  }
  for (int e = 0; e < N; e++)
    if (has(p.rest, e)) claim(r, e, MASTER, true);
  u8 made = 0;
  for (int e = 0; e < N; e++)
    if (has(p.rest, e)) made |= 1 << e;
  if (on(PUSH_WITH_CLAIM)) push_rest(r, made);
  if (on(TAKEN_WITH_TURN) && p.taken > r.taken) r.taken = p.taken;
  read();
  return true;
}
// The one repair. The caller names ids of one ticket, and which of them it has as running, where, and as reported.
static void settle(State& s, const Settle& q, bool redrive, u8& waits, u8& ended) {
  Redis& r = s.r;
  int t = q.ticket;
  waits = ended = 0;
  u8 moved = 0, redriven = redrive && r.exception[t] ? 1 << (r.exception[t] - 1) : 0;
  if (redrive) r.exception[t] = 0;
  for (int e = 0; e < N; e++) {
    if (!has(q.ids, e) || (e >= r.taken && on(SETTLE_UP_TO_TAKEN))) continue;
    bool body = !has(r.gone, e), queued = has(queue_set(r, t), e), halts = r.exception[t] == e + 1;
    u8 who = r.pending[e];
    bool take = who == MASTER || (who == HALTED && redrive);
    if (who >= OWNER) {
      int i = who - OWNER;
      if (live(r, i) && on(SETTLE_DEAD_ONLY)) {
        queue_remove(r, t, e);
        continue;
      }
      if (on(ALIVE_FIRST) && who != STRANGER) delete_alive(s, i);
      take = true;
    }
    if (who == HALTED && !take) {
      if (body && !r.exception[t] && on(EXCEPTION_STANDS)) r.exception[t] = e + 1;
      if (body) continue;
      take = true;  // its letter has the fields; there is nothing to go on with
    }
    if (halts && body && (who == FREE || who == MASTER || who == STRANGER) && on(EXCEPTION_STANDS)) {
      r.pending[e] = HALTED;
      queue_remove(r, t, e);
      continue;
    }
    if (who == FREE) {
      bool may_run = !has(q.running, e) || (live(r, q.owner) && !has(q.said, e));
      if (!body && !queued && may_run && on(LEAVE_BODYLESS)) continue;
      if (body && !queued && !has(redriven, e) && on(CLAIM_ONLY_NAMED)) {
        ended |= 1 << e;  // acknowledged; the report was lost
        continue;
      }
      take = true;
      if (body) r.done &= ~(1 << e);  // FORCE
    }
    if (!take) continue;
    if (!body) {
      r.pending[e] = FREE, r.done |= 1 << e, ended |= 1 << e;
      if (halts) r.exception[t] = 0;
      queue_remove(r, t, e);
      continue;
    }
    r.pending[e] = MASTER;
    waits |= 1 << e;
    if (queued) continue;
    moved |= 1 << e;
    int at = 0;
    while (at < r.queued[t] && (r.queue[t][at] < e || !on(SETTLE_IN_PLACE))) at++;
    queue_insert(r, t, at, e);
  }
  for (int i = 0; i < I; i++) {  // the last page: nothing is pending for a dead one any more
    bool rest = r.lease[i] != DEAD;
    for (int e = 0; e < N; e++) rest |= r.pending[e] == OWNER + i;
    if (!rest) inbox_clear(r, i);
  }
  u8 said = on(SETTLE_ANSWERS_ALL) ? waits : moved;
  leave_note(s, redrive ? NOTE_REDRIVE : SETTLE_NOTES, {SETTLED, 0, (u8)t, said, ended, (u8)(r.exception[t] != 0)});
}
// The owner's scripts: give back, and a letter that parks its ticket or skips its message.
static int run_call(State& s, int i, const Call& call) {
  Redis& r = s.r;
  int t = call.ticket;
  if (!live(r, i)) return LOST_LEASE;
  if (on(ONCE) && has(s.ran, i)) return GIVEN;
  s.ran |= 1 << i, s.ran_fence[i] = r.top_fence;
  u8 mine = 0, asked = call.ids | (on(GIVE_UNREAD) ? in_inbox(r, i) & ids_of(t) : 0);
  for (int e = 0; e < N; e++)
    if (has(asked, e) && r.pending[e] == OWNER + i) mine |= 1 << e;
  auto give = [&](u8 set) {
    int front = 0;
    for (int e = 0; e < N; e++) {
      if (!has(set, e)) continue;
      if (has(r.gone, e)) { r.pending[e] = FREE, r.done |= 1 << e; continue; }
      r.pending[e] = MASTER;
      if (on(GIVE_BACK_QUEUES)) queue_insert(r, t, on(GIVE_BACK_IN_FRONT) ? front++ : r.queued[t], e);
    }
    return (u8)(on(NOTE_WHAT_MOVED) ? set & ~r.gone : set);
  };
  auto note = [&](u64 rule, u8 kind, u8 moved) {
    leave_note(s, rule, {kind, (u8)i, (u8)t, moved, 0, s.ran_fence[i]});
  };
  if (call.kind == GIVE_BACK) {
    if (mine || on(NOTE_EMPTY)) note(NOTE_GIVE_BACK, GAVE_BACK, give(mine));
    return mine ? GIVEN : GONE;
  }
  if (r.pending[call.id] != OWNER + i) {
    if (on(GIVE_THE_REST) && call.kind == PARK_LETTER) note(NOTE_PARK, GAVE_BACK, give(mine));
    return GONE;
  }
  if (call.kind == PARK_LETTER) {
    r.pending[call.id] = HALTED, r.exception[t] = call.id + 1;
    note(NOTE_PARK, PARKED, give(mine & ~(1 << call.id)));
  } else {
    r.pending[call.id] = FREE, r.done |= 1 << call.id;
  }
  return GIVEN;
}

// ---- the leader ----------------------------------------------------------------------------------------------------------
static void apply(Leader& m, const Note& note) {
  int t = note.ticket;
  u8 all = ids_of(t);
  if (note.kind == GAVE_BACK || note.kind == PARKED) {
    if (m.owner[t] == note.who && m.fence[t] <= note.fence) m.running &= ~all, release(m, t);
    m.waiting |= note.waits;
    if (note.kind == PARKED) m.halted |= 1 << t;
  } else if (note.kind == SETTLED) {
    m.waiting = (m.waiting | note.waits) & ~note.over;
    m.running &= ~(note.waits | note.over);
    m.doubt &= ~(1 << t);
    m.halted = note.fence ? m.halted | 1 << t : m.halted & ~(1 << t);
    if (!on(WHOLE_TICKET) && note.waits) m.running &= ~all;
    if (m.owner[t] != NONE && !(m.running & all)) release(m, t);
  } else if (note.kind == LEAVES) {
    m.shut |= 1 << note.who;
  }
}
static void set_watch(State& s, int x) {  // WATCH epoch changes; GET epoch; XRANGE changes (<last seen> +
  Leader& m = s.m[x];
  m.dirty = 0, m.noted = m.note_count;
  m.heard_epoch = s.epoch == m.epoch && s.lease_of == x, m.heard_changes = s.changes;
}
static void read_lists(const State& s, Leader& m) {
  for (int e = 0; e < N; e++) {
    u8 who = s.r.pending[e];
    m.saw_list[e] = who >= OWNER && !live(s.r, who - OWNER) && !on(ALL_LISTS) ? FREE : who;
  }
}
static void read_queues(const State& s, Leader& m) {
  for (int t = 0; t < T; t++) {
    m.saw_queue |= queue_set(s.r, t);
    if (s.r.exception[t] && on(READ_EXCEPTIONS)) m.saw_halted |= 1 << t;
  }
}
static void conclude(const State& s, Leader& m) {  // memory from what was read; bodies tell the ticket, where there is one
  m.waiting = m.saw_queue, m.halted = m.saw_halted;
  for (int e = 0; e < N; e++) {
    int t = ticket_of[e];
    u8 who = m.saw_list[e];
    bool queued = has(m.saw_queue, e);
    if (queued != (who == MASTER) && on(READ_BOTH)) m.doubt |= 1 << t;
    if (who == HALTED && !has(m.saw_halted, t) && on(READ_BOTH) && on(READ_EXCEPTIONS)) m.doubt |= 1 << t;
    if (who == STRANGER && on(READ_BOTH)) m.doubt |= 1 << t;
    if (who >= OWNER && who < STRANGER && !has(s.r.gone, e)) m.running |= 1 << e, m.owner[t] = who - OWNER;
  }
  memset(m.saw_list, 0, N);
  m.saw_queue = m.saw_halted = 0;
}
static void lose_packet(State& n, int x) {  // it may be executed later, or never
  const Leader& m = n.m[x];
  for (int k = 0; m.packet.kind && !m.packet.executed && k < 2; k++)
    if (!n.late[k].kind) {
      n.late[k] = m.packet, n.late[k].dirty = m.dirty;
      return;
    }
}
static void plan_turns(const State& s, int x) {
  const Leader& m = s.m[x];
  struct Choice { u8 to, ids; };
  vector<Choice> choices[T];
  for (int t = 0; t < T; t++) {
    choices[t].push_back({NONE, 0});
    u8 ready = (m.waiting | m.batch) & ids_of(t), owner = m.owner[t];
    if (!ready || has(m.halted, t) || (has(m.doubt, t) && on(SHUT_IN_DOUBT))) continue;
    int room = window - size(m.running & ids_of(t));
    for (int to = 0; to < I; to++) {
      if (has(m.shut, to) || (owner != NONE ? to != owner : s.r.lease[to] == NO_LEASE)) continue;
      u8 some = 0;
      for (int e = 0, k = 0; e < N && k < room; e++)
        if (has(ready, e)) some |= 1 << e, k++, choices[t].push_back({(u8)to, some});
    }
  }
  u8 end = 0;
  for (int e = 0; e < N; e++)
    if (has(m.batch, e)) end = e + 1;
  vector<int> counts = {0};
  if (size(m.waiting) < 2 && s.r.delivered < N) {
    counts.push_back(1);
    if (N - s.r.delivered > 1) counts.push_back(N - s.r.delivered);
  }
  bool something_to_hear = s.changes != m.heard_changes || s.epoch != m.epoch || s.lease_of != x;
  for (const Choice& a : choices[0])
    for (const Choice& b : choices[1])
      for (int count : counts) {
        if (!a.ids && !b.ids && !count && !m.batch && !(on(HEAR_WHEN_IDLE) && something_to_hear)) continue;
        State n = s;
        Packet p = {};
        p.kind = TURN, p.to[0] = a.to, p.to[1] = b.to, p.ids[0] = a.ids, p.ids[1] = b.ids;
        if (!a.ids) p.to[0] = 0;
        if (!b.ids) p.to[1] = 0;
        if (a.ids | b.ids) p.fence = ++n.m[x].next_fence;
        p.fresh = m.batch, p.rest = on(CLAIM_THE_REST) ? m.batch & ~(a.ids | b.ids) : 0;
        p.taken = m.batch ? end : 0, p.count = count;
        n.m[x].packet = p;
        if (!on(SAME_CONNECTION)) n.m[x].dirty = 0;
        emit(n, s_SENDS, x, 0);
      }
}
static void ask_settle(const State& s, int x) {  // whatever is in doubt; the reply is not waited for: the note tells
  const Leader& m = s.m[x];
  const Redis& r = s.r;
  if (s.settle.sent) return;
  for (int t = 0; t < T; t++) {
    bool told = false;  // executed, not applied yet
    for (int k = 0; k < m.note_count; k++) told |= m.note[k].kind == SETTLED && m.note[k].ticket == t;
    if (told) continue;
    u8 all = ids_of(t), ask = 0, owner = m.owner[t];
    for (int e = 0; e < N; e++) {
      if (!has(all, e)) continue;
      u8 who = r.pending[e];
      if (who >= OWNER && who < STRANGER && r.lease[who - OWNER] == DEAD && !(pages && ask)) ask |= 1 << e;  // a page of its list
      bool queued = has(queue_set(r, t), e);
      if (queued != (who == MASTER) || has(m.doubt, t)) ask |= 1 << e;                     // the two differ
      if ((who == HALTED && r.exception[t] != e + 1) || who == STRANGER) ask |= 1 << e;
      if (r.exception[t] == e + 1 && who != HALTED) ask |= 1 << e;
      if (!has(m.running, e) || owner == NONE || !on(ASK_LOST_REPORTS)) continue;
      bool unsure = who == FREE && has(r.gone, e) && live(r, owner) && !has(s.c[owner].reported, e);
      if (live(r, owner) && has(s.c[owner].reported & m.handed, e) && !eager) continue;               // its report is on its way
      if (who != OWNER + owner && !unsure && !(pages && ask)) ask |= 1 << e;               // nobody reported
      if (who == OWNER + owner && !live(r, owner) && !(pages && ask)) ask |= 1 << e;
    }
    if (!on(SETTLE_DEAD_ONLY)) ask |= all & m.running;  // "idle for long"
    if (!ask) continue;
    State n = s;
    n.settle = {1, m.epoch, (u8)t, ask, owner, 0, 0, 0, 0, 0};
    if (owner != NONE) n.settle.running = ask & m.running, n.settle.said = ask & m.running & s.c[owner].reported;
    for (int i = 0; i < I; i++)
      if (r.lease[i] == DEAD) n.m[x].shut |= 1 << i;
    emit(n, s_SENDS_SETTLE, x, 0);
  }
}
static void lead(const State& s, int x) {
  const Leader& m = s.m[x];
  bool mine = s.epoch == m.epoch && s.lease_of == x;
  auto fenced = [&] {
    State n = s;
    forget(n.m[x]);
    n.m[x].epoch = 0;
    emit(n, s_FENCED, x, 0);
  };
  auto broken = [&](State& n, int fault) {  // whatever is unsure: memory goes, a new epoch
    forget(n.m[x]);
    emit_fault(n, fault, s_REPLY_LOST, x, 0);
  };
  if (!m.up) {
    State n = s;
    n.m[x].up = 1, n.m[x].epoch = 0;
    forget(n.m[x]);
    return emit(n, s_LEADER_STARTS, x, 0);
  }
  if (s.lease_of == x && s.left[LEADER]) {
    State n = s;
    n.lease_of = NONE;
    if (on(EXPIRY_ABORTS)) epoch_changes(n);
    emit_fault(n, LEADER, s_LEASE_OF_LEADER_ENDS, x, 0);
    n = s;
    lose_packet(n, x);
    n.m[x].up = 0, n.m[x].epoch = 0;
    forget(n.m[x]);
    n.lease_of = NONE;
    if (on(EXPIRY_ABORTS)) epoch_changes(n);
    emit_fault(n, LEADER, s_LEADER_CRASHES, x, 0);
  }
  auto begin = [&](bool new_epoch) {
    State n = s;
    lose_packet(n, x);
    if (new_epoch) n.epoch++, epoch_changes(n);
    n.lease_of = x;
    forget(n.m[x]);
    n.m[x].epoch = n.epoch, n.m[x].at = BEGIN, n.m[x].heard_epoch = 2;
    emit(n, s_ELECTED, x, 0);
  };
  if (s.lease_of == NONE && (!m.epoch || m.at == ELECT)) begin(true);
  if (!m.epoch) return;
  if (m.at == ELECT) return mine ? begin(on(NEW_EPOCH)) : fenced();
  State n = s;
  Leader& q = n.m[x];
  if (m.at == BEGIN) {
    q.next_fence = s.r.top_fence;
    q.at = READ_1;
    if (on(WATCH_FIRST)) {
      q.note_count = 0;
      memset(q.note, 0, sizeof q.note);
      set_watch(n, x);
      q.known_changes = q.heard_changes;
    } else q.heard_epoch = 1;
    return emit(n, s_WATCHES, x, 0);
  }
  if (m.at == READ_1) {
    if (!mine) return fenced();
    for (int i = 0; i < I; i++)
      if (s.r.lease[i] == DEAD || s.r.lease[i] == DRAINING) q.shut |= 1 << i;
    read_lists(s, q);
    q.at = READ_2;
    return emit(n, s_READS_1, x, 0);
  }
  if (m.at == READ_2) {
    read_queues(s, q);
    conclude(s, q);
    q.at = REWINDING;
    return emit(n, s_READS_2, x, 0);
  }
  if (m.at == REWINDING) {
    if (on(REWIND_BY_EPOCH) && !mine) return fenced();
    if (on(REWIND)) n.r.delivered = s.r.taken;
    if (!on(WATCH_FIRST)) set_watch(n, x), q.known_changes = q.heard_changes;
    q.at = LEADS;
    return emit(n, s_REWINDS, x, 0);
  }
  if (mine || !on(SETTLE_BY_EPOCH)) ask_settle(s, x);
  for (int e = 0; e < N; e++)  // reports by HTTP, at any time
    for (int i = 0; i < I; i++)
      if (has(m.running, e) && has(s.c[i].reported, e) && m.owner[ticket_of[e]] == i &&
          (has(m.handed, e) || !on(REPORT_BY_RECORD))) {
        n = s;
        q.running &= ~(1 << e);
        if (!(q.running & ids_of(ticket_of[e]))) release(q, ticket_of[e]);
        emit(n, s_REPORT, x, 1 << e);
        break;
      }
  n = s;
  if (m.packet.kind && !m.packet.executed) {
    execute(n, q.packet, m.dirty);
    q.packet.executed = 1;
    set_watch(n, x);
    emit(n, s_EXECUTED, x, 0);
    if (!s.left[LOST]) return;
    n = s;
    lose_packet(n, x);
    return broken(n, LOST);
  }
  if (m.packet.kind) {
    Packet p = m.packet;
    memset(&q.packet, 0, sizeof p);
    if (p.kind == TURN && p.ok) {
      u8 given = p.ids[0] | p.ids[1];
      for (int t = 0; t < T; t++)
        if (p.ids[t]) q.owner[t] = p.to[t], q.fence[t] = p.fence;
      q.running |= given, q.handed |= given;
      q.waiting = (q.waiting | p.rest) & ~given;
      q.batch = p.got;
      if (on(DROP_OLD)) q.batch &= ~below(s.r.taken);
      for (int i = 0; i < I && !on(RECORD_WITH_CLAIM); i++) {
        Record record = {HANDED, 0, p.fence};
        for (int t = 0; t < T; t++)
          if (p.ids[t] && p.to[t] == i) record.ids |= p.ids[t];
        if (record.ids) inbox_add(n.r, i, record);
      }
      if (!on(TAKEN_WITH_TURN) && p.taken > n.r.taken) n.r.taken = p.taken;
      if (!on(PUSH_WITH_CLAIM)) push_rest(n.r, p.rest);
      for (int t = 0; t < T && !on(POP_WITH_CLAIM); t++) queue_pop(n.r, t, size(p.ids[t] & ~p.fresh));
    } else if (p.kind == TURN && !on(READ_WITH_TURN)) {
      q.batch |= p.got;
    } else if (p.kind == ASK_BACK && !p.ok) {
      q.recalled &= ~(1 << p.ids[0]);
    }
    emit(n, s_REPLY, x, 0);
    if (!s.left[LOST]) return;
    n = s;
    return broken(n, LOST);
  }
  if (on(LOOK_FIRST) && !m.heard_epoch) return fenced();
  if (on(READ_CHANGES) && m.heard_changes != m.known_changes) {
    for (int k = 0; k < m.noted; k++) apply(q, m.note[k]);
    for (int k = m.noted; k < m.note_count; k++) q.note[k - m.noted] = m.note[k];
    for (int k = m.note_count - m.noted; k < NOTES; k++) memset(&q.note[k], 0, sizeof(Note));
    q.note_count -= m.noted, q.noted = 0, q.known_changes = m.heard_changes;
    return emit(n, s_APPLIES, x, 0);
  }
  int next = s.r.delivered > s.r.taken ? s.r.delivered : s.r.taken;
  for (int k = 1; doorbell && !m.batch && k <= N - next; k++) {
    n = s;
    q.batch = below(next + k) & ~below(next) & ~s.r.gone;
    if (q.batch) emit(n, s_HEARS, x, q.batch);
  }
  plan_turns(s, x);
  for (int t = 0; t < T; t++) {
    u8 owner = m.owner[t];
    if (owner == NONE || !(m.running & ids_of(t)) || has(m.recalled, t) || has(m.shut, owner) || !s.left[RECALL]) continue;
    n = s;
    n.left[RECALL]--;
    q.recalled |= 1 << t;
    q.packet.kind = ASK_BACK, q.packet.to[0] = owner, q.packet.ids[0] = t;
    emit(n, s_SENDS, x, 0);
  }
}

// ---- a consumer --------------------------------------------------------------------------------------------------------------
static void acknowledge(State& n, int i, u8 set) {  // XACK has no owner: whoever has it pending loses it
  for (int e = 0; e < N; e++) {
    if (!has(set, e)) continue;
    u8 who = n.r.pending[e];
    if (who != FREE && who != OWNER + i)
      violate("ACK THEFT: " + inc(i) + " acknowledges " + id(e) + ", which is pending for somebody else",
              {s_ACKED, (u8)i, set});
    if (who != FREE || has(n.r.gone, e)) n.r.pending[e] = FREE, n.r.done |= 1 << e;
  }
}
static void call_script(State& n, int i, Call call) {
  n.c[i].call = call;
  n.ran &= ~(1 << i), n.ran_fence[i] = 0;
  if (on(ONCE)) memset(&n.late_call[i], 0, sizeof(Call));  // the one before has a lower number: it does nothing
}
static void consume(const State& s, int i) {
  const Consumer& c = s.c[i];
  const Redis& r = s.r;
  State n = s;
  Consumer& q = n.c[i];
  bool living = live(r, i);
  if (s.late_ack[i].state) {
    Ack late = s.late_ack[i];
    memset(&n.late_ack[i], 0, sizeof late);
    emit(n, s_NEVER, i, 0);
    if (!late.dirty) acknowledge(n, i, late.ids);
    emit(n, s_LATE_ACK, i, late.ids | (late.dirty ? 128 : 0));
    n = s;
  }
  if (s.late_call[i].state) {
    memset(&n.late_call[i], 0, sizeof(Call));
    emit(n, s_NEVER, i, 0);
    run_call(n, i, s.late_call[i]);
    emit(n, s_LATE_CALL, i, 0);
    n = s;
  }
  for (int e = 0; e < N; e++)
    if (has(r.gone, e) && r.pending[e] == OWNER + i && living && c.process == 1 && !redis6) {
      n.r.pending[e] = FREE;
      emit(n, s_DROPPED, i, e);
      n = s;
    }
  if (I > 2 && c.process == 0 && i >= 2 && s.c[i - 2].process == 2) {  // a new incarnation of the same name
    int former = i - 2;
    q.process = q.looked = 1, n.r.lease[i] = LIVE, n.r.lease[former] = DEAD;
    delete_alive(n, former);
    inbox_clear(n.r, former);
    leave_note(n, NOTE_REGISTER, {JOINED, (u8)i, 0, 0, 0, 0});
    emit(n, s_REGISTERS, i, 0);
    n = s;
  }
  if (living && c.process == 2) {
    n.r.lease[i] = DEAD;
    emit(n, s_LEASE_ENDS, i, 0);
    n = s;
  }
  if (c.process != 1) return;
  auto exits = [&] {
    end_process(n, i);
    emit(n, s_EXITS, i, 0);
    n = s;
  };
  if (s.left[CRASH]) end_process(n, i), emit_fault(n, CRASH, s_CRASHES, i, 0), n = s;
  if (living && s.left[EXPIRE]) n.r.lease[i] = DEAD, emit_fault(n, EXPIRE, s_LEASE_ENDS, i, 0), n = s;
  if (!living) exits();
  auto quiet = [&](int t) { return c.runs[t] == NONE && !((c.ended | c.ack.ids) & ids_of(t)); };
  // the inbox, a record at a time; what is read is trimmed
  if (r.inbox_count[i] && living && !(on(STAND_STILL) && c.call.state)) {
    Record record = r.inbox[i][0];
    inbox_drop(n.r, i, 0);
    if (record.kind == HANDED) {
      for (int e = 0; e < N; e++) {
        if (!has(record.ids, e)) continue;
        int t = ticket_of[e];
        if (on(DROP_CLOSED) && record.fence <= c.closed[t]) continue;
        if (has(held(c), e) && !(c.call.state && ((c.call.kind != GIVE_BACK && c.call.id == e) ||
                                                  (c.call.ticket == t && has(c.known, e))))) continue;
        q.known |= 1 << e, q.fence[e] = record.fence;
      }
      emit(n, s_READS_RECORD, i, record.ids);
    } else if (!c.call.state) {
      int t = record.ids;
      u8 mine = c.known & ids_of(t);
      if (mine && !c.drains && (!on(QUIET_FIRST) || quiet(t))) {
        call_script(n, i, {1, GIVE_BACK, (u8)t, 0, 0, mine, 0});
        emit(n, s_CALLS, i, 0);
      } else emit(n, s_PASSES_OVER, i, 0);
    }
    n = s;
  }
  if (c.call.state == 1) {
    q.call.answer = run_call(n, i, c.call), q.call.state = 2;
    emit(n, s_CALL_RUNS, i, 0);
    n = s;
    if (s.left[LOST] && !s.late_call[i].state) {
      n.late_call[i] = c.call;
      if (!on(UNTIL_SURE)) q.call.state = 2, q.call.answer = GONE;
      emit_fault(n, LOST, s_CALL_LOST, i, 0);
      n = s;
    }
  } else if (c.call.state == 2) {
    Call call = c.call;
    memset(&q.call, 0, sizeof call);
    if (call.answer == LOST_LEASE) {
      end_process(n, i);
    } else {
      int t = call.ticket;
      if (call.kind != SKIP_LETTER) {
        q.closed[t] = s.ran_fence[i];
        for (int e = 0; e < N; e++)
          if (ticket_of[e] == t && has(q.known, e) && q.fence[e] <= s.ran_fence[i]) q.known &= ~(1 << e);
      }
      if (call.kind != GIVE_BACK) q.runs[t] = NONE;
      if (call.kind == SKIP_LETTER) q.reported |= 1 << call.id;
    }
    emit(n, s_CALL_REPLY, i, call.answer);
    n = s;
    if (s.left[LOST]) {
      if (on(UNTIL_SURE)) q.call.state = 1, q.call.answer = 0;
      else q.call.answer = GONE;
      emit_fault(n, LOST, s_CALL_LOST, i, 0);
      n = s;
    }
  }
  for (int t = 0; t < T; t++) {
    u8 all = ids_of(t), ready = c.known & all;
    bool called = c.call.state && c.call.ticket == t;
    if (c.runs[t] == NONE) {
      if (on(HOLD) && called) ready = 0;
      if (ready && !c.drains) {
        int e = lowest(ready);
        check_start(s, i, e);
        q.runs[t] = e, q.known &= ~(1 << e);
        if (living && c.fence[e] >= n.best_fence[t]) n.best_fence[t] = c.fence[e], n.best_owner[t] = i;
        emit(n, s_STARTS, i, e);
        n = s;
      }
      if (c.drains && ready && living && !c.call.state && quiet(t)) {
        call_script(n, i, {1, GIVE_BACK, (u8)t, 0, 0, ready, 0});
        emit(n, s_CALLS, i, 0);
        n = s;
      }
    } else if (!(called && c.call.kind != GIVE_BACK)) {
      int e = c.runs[t];
      q.runs[t] = NONE, q.ended |= 1 << e;
      emit(n, s_RETURNS, i, e);
      n = s;
      if (c.call.state || ((c.ended | c.ack.ids) & all)) continue;
      for (int kind = PARK_LETTER; kind <= SKIP_LETTER; kind++) {
        int fault = kind == PARK_LETTER ? PARK : SKIP;
        if (!s.left[fault]) continue;
        call_script(n, i, {1, (u8)kind, (u8)t, 0, (u8)e, (u8)((c.known & all) | 1 << e), 0});
        emit_fault(n, fault, s_CALLS, i, 0);
        n = s;
      }
    }
  }
  if (c.ack.state == 0 && c.ended) {
    if (on(LOOK_ALIVE) && !c.looked) exits();
    else {
      q.ack = {c.ended, 1, 0};
      if (!on(SAME_CONNECTION)) q.dirty = 0;
      emit(n, s_SENDS_ACK, i, c.ended);
      n = s;
    }
  } else if (c.ack.state == 1) {
    if (!c.dirty) acknowledge(n, i, c.ack.ids);
    q.ack.state = c.dirty ? 3 : 2, q.dirty = 0, q.looked = !has(r.no_alive, i);
    emit(n, s_ACKED, i, c.ack.ids | (c.dirty ? 128 : 0));
    n = s;
    if (s.left[LOST] && !s.late_ack[i].state) {
      n.late_ack[i] = c.ack, n.late_ack[i].dirty = c.dirty;
      q.ack.state = 4;
      emit_fault(n, LOST, s_ACK_LOST, i, 0);
      n = s;
    }
  } else if (c.ack.state == 4) {  // a new connection: WATCH, EXISTS, XPENDING of these ids
    q.dirty = 0, q.looked = !has(r.no_alive, i);
    if (!q.looked) exits();
    else {
      u8 again = 0;
      for (int e = 0; e < N && on(ASK_LOST_ACK); e++)
        if (has(c.ack.ids, e) && r.pending[e] == OWNER + i) again |= 1 << e;
      u8 done = c.ack.ids & ~again;
      q.ended &= ~done, q.reported |= done;
      memset(&q.ack, 0, sizeof q.ack);
      emit(n, s_ACK_REPLY, i, done);
      n = s;
    }
  } else if (c.ack.state) {
    Ack ack = c.ack;
    memset(&q.ack, 0, sizeof ack);
    if (ack.state == 2) q.ended &= ~ack.ids, q.reported |= ack.ids;
    emit(n, s_ACK_REPLY, i, ack.ids | (ack.state == 2 ? 0 : 128));
    n = s;
    if (s.left[LOST]) q.ack.state = 4, emit_fault(n, LOST, s_ACK_LOST, i, 0), n = s;
  }
  if (!on(ASK_LOST_REPORTS) && c.reported) {
    q.reported = 0;
    faulty = true, emit(n, s_REPORTS_LOST, i, 0), faulty = false, n = s;
  }
  if (!c.drains && r.lease[i] == LIVE && s.left[DRAIN]) {
    n.r.lease[i] = DRAINING, q.drains = 1;
    leave_note(n, NOTE_DRAIN, {LEAVES, (u8)i, 0, 0, 0, 0});
    emit_fault(n, DRAIN, s_DRAINS, i, 0);
    n = s;
  }
  if (c.drains && living && !held(c) && !c.ack.state && !c.call.state) {
    for (int e = 0; e < N; e++)
      if (r.pending[e] == OWNER + i) return;
    if (in_inbox(r, i)) return;
    end_process(n, i);
    n.r.lease[i] = DEAD;
    delete_alive(n, i);
    inbox_clear(n.r, i);
    leave_note(n, NOTE_DRAIN, {LEAVES, (u8)i, 0, 0, 0, 0});
    emit(n, s_DEREGISTERS, i, 0);
  }
}

// ---- everything else that happens ----------------------------------------------------------------------------------------------
static void all_start_over(State& n) {
  n.lease_of = NONE;
  memset(n.late, 0, sizeof n.late);
  memset(n.late_ack, 0, sizeof n.late_ack);
  memset(n.late_call, 0, sizeof n.late_call);
  memset(&n.settle, 0, sizeof n.settle);
  memset(&n.late_settle, 0, sizeof n.late_settle);
  for (int x = 0; x < 2; x++) n.m[x].epoch = 0, n.m[x].dirty = 1, forget(n.m[x]);
  for (int i = 0; i < I; i++) {
    Consumer& c = n.c[i];
    if (c.process == 1 && on(ALL_START_OVER)) {
      n.r.lease[i] = DEAD, n.r.no_alive |= 1 << i, c.dirty = 1, c.looked = 0;
      if (c.ack.state) c.ack.state = 3;
      if (c.call.state) c.call.state = 2, c.call.answer = LOST_LEASE;
    } else {
      if (c.ack.state) c.ack.state = 4;
      if (c.call.state) c.call.state = 1, c.call.answer = 0;
    }
  }
}
static void outside(const State& s) {
  const Redis& r = s.r;
  State n = s;
  for (bool late : {false, true}) {
    const Settle& call = late ? s.late_settle : s.settle;
    if (!call.sent) continue;
    if (call.sent == 2) {  // without SETTLE_NOTES: memory learns it from the reply, whenever that comes
      memset(&n.settle, 0, sizeof call);
      emit(n, s_NEVER, 0, 0);
      for (int x = 0; x < 2; x++)
        if (n.m[x].epoch == call.epoch && n.m[x].at == LEADS)
          apply(n.m[x], {SETTLED, 0, call.ticket, call.waits, call.over, call.halted});
      emit(n, s_SETTLE_REPLY, call.waits, call.over);
      n = s;
      continue;
    }
    memset(late ? &n.late_settle : &n.settle, 0, sizeof call);
    emit(n, s_SETTLE_VANISHES, call.epoch, 0);
    if (call.epoch == s.epoch || !on(SETTLE_BY_EPOCH)) {
      u8 waits, ended;
      settle(n, call, false, waits, ended);
      if (!on(SETTLE_NOTES) && !late)
        n.settle = call, n.settle.sent = 2, n.settle.waits = waits, n.settle.over = ended,
        n.settle.halted = n.r.exception[call.ticket] != 0;
      emit(n, s_SETTLE_RUNS, waits, ended);
    }
    n = s;
    if (late || !s.left[LOST] || s.late_settle.sent) continue;
    n.late_settle = call;  // its sender does not know whether it will be executed, and may ask again
    memset(&n.settle, 0, sizeof call);
    emit_fault(n, LOST, s_SETTLE_LOST, NONE, 0);
    n = s;
  }
  for (int k = 0; k < 2; k++) {
    if (!s.late[k].kind) continue;
    Packet p = s.late[k];
    memset(&n.late[k], 0, sizeof p);
    emit(n, s_NEVER, k, 0);
    bool done = execute(n, p, p.dirty);
    emit(n, s_LATE_PACKET, k, done);
    n = s;
  }
  for (int t = 0; t < T; t++)
    if (r.exception[t]) {
      u8 waits, ended, e = r.exception[t] - 1;
      settle(n, {1, s.epoch, (u8)t, (u8)(1 << e), NONE, 0, 0, 0, 0, 0}, true, waits, ended);
      emit(n, s_REDRIVEN, NONE, e);
      n = s;
    }
  for (int e = 0; e < N && s.left[DELETE]; e++)
    if (!has(r.done | r.gone, e)) {
      n.r.gone |= 1 << e;
      emit_fault(n, DELETE, s_DELETED, NONE, e);
      n = s;
    }
  for (int k = 1; k <= r.delivered && s.left[SETID]; k++) {
    n.r.delivered -= k;
    emit_fault(n, SETID, s_SETID_BACK, NONE, n.r.delivered);
    n = s;
  }
  for (int t = 0; t < T && s.left[DELQ]; t++)
    if (r.queued[t]) {
      n.r.queued[t] = 0;
      memset(n.r.queue[t], 0, N);
      emit_fault(n, DELQ, s_QUEUE_LOST, NONE, t);
      n = s;
    }
  for (int t = 0; t < T && s.left[DELEXC]; t++)
    if (r.exception[t]) {
      n.r.exception[t] = 0;
      emit_fault(n, DELEXC, s_EXCEPTION_LOST, NONE, t);
      n = s;
    }
  for (int e = 0; e < N && s.left[STRAY]; e++)
    if (r.pending[e] == MASTER || r.pending[e] == HALTED) {
      n.r.pending[e] = STRANGER;
      emit_fault(n, STRAY, s_CLAIMED_AWAY, NONE, e);
      n = s;
    }
  int oldest = N;
  for (u8 name : {MASTER, HALTED}) {
    u8 lost = 0;
    for (int e = N - 1; e >= 0; e--) {
      if (r.pending[e]) oldest = e;
      if (r.pending[e] == name) lost |= 1 << e, n.r.pending[e] = FREE;
    }
    if (lost && s.left[DELNAME]) emit_fault(n, DELNAME, s_NAME_DELETED, NONE, lost);
    n = s;
  }
  if (s.left[TRIM]) {
    int floor = on(TRIM_BY_TAKEN) ? r.taken : r.delivered;
    if (oldest < floor) floor = oldest;
    for (int e = 0; e < floor; e++)
      if (!has(r.done | r.gone, e)) violate("LOST: " + id(e) + " is trimmed, and not done", {s_TRIMS, NONE, (u8)floor});
  }
  for (int at = 0; s.left[GROUP] && at <= oldest && at <= r.taken; at++) {  // XGROUP CREATE at the saved position
    n.r.delivered = n.r.taken = at;
    n.r.done &= below(at);
    memset(n.r.pending, FREE, N);
    memset(n.r.queued, 0, T);
    memset(n.r.queue, 0, sizeof n.r.queue);
    all_start_over(n);
    for (int i = 0; i < I; i++) {
      if (n.r.lease[i]) n.r.lease[i] = DEAD, n.r.no_alive |= 1 << i;
      inbox_clear(n.r, i);
    }
    emit_fault(n, GROUP, s_GROUP_LOST, NONE, at);
    n = s;
  }
#ifdef ROLLBACK
  if (s.left[ROLL] && !s.has_disk) {
    n.has_disk = 1, n.disk = r;
    faulty = true, emit(n, s_ON_DISK, NONE, 0), faulty = false;
    n = s;
  }
  if (s.left[ROLL] && s.has_disk) {  // epochs and fences are made of time: they do not go back
    u8 fence = r.top_fence;
    n.r = s.disk, n.r.top_fence = fence, n.has_disk = 0;
    memset(&n.disk, 0, sizeof n.disk);
    all_start_over(n);
    emit_fault(n, ROLL, s_WENT_BACK, NONE, 0);
  }
#endif
}

// ---- liveness: from every state there is a way, without further faults, to where all is done ------------------------------------
static int find_stuck() {
  size_t count = states.size();
  vector<u32> first(count + 1, 0);
  for (u32 to : edge_to) first[to + 1]++;
  for (size_t k = 0; k < count; k++) first[k + 1] += first[k];
  vector<u32> at(first.begin(), first.end() - 1), back(edge_to.size()), queue;
  for (size_t k = 0; k < edge_to.size(); k++) back[at[edge_to[k]]++] = edge_from[k];
  vector<u8> good(count, 0);
  for (u32 k = 0; k < count; k++)
    if (all_done(states[k])) good[k] = 1, queue.push_back(k);
  size_t ends = queue.size(), stuck = 0;
  for (size_t h = 0; h < queue.size(); h++)
    for (u32 k = first[queue[h]]; k < first[queue[h] + 1]; k++)
      if (!good[back[k]]) good[back[k]] = 1, queue.push_back(back[k]);
  u32 example = 0;
  for (u32 k = 0; k < count; k++) {
    if (good[k]) continue;
    bool somebody = false;
    for (int i = 0; i < I; i++) {
      const Consumer& c = states[k].c[i];
      somebody |= (c.process == 1 && states[k].r.lease[i] == LIVE && !c.drains) || (i >= 2 && c.process == 0);
    }
    if (somebody && !stuck++) example = k;
  }
  printf("  all done in %zu states; stuck: %zu\n", ends, stuck);
  if (!stuck) return 0;
  print_trace(example);
  const State& s = states[example];
  printf("  >> STUCK from here on; done %s, queues %s\n", ids(s.r.done).c_str(),
         ids(queue_set(s.r, 0) | queue_set(s.r, 1)).c_str());
  for (int x = 0; x < 2; x++) printf("     M%d: %s\n", x, memory(s.m[x]).c_str());
  return 1;
}

int main(int argc, char** argv) {
  string title = "all rules";
  size_t most = 16000000;
  double seconds = 200;
  for (int k = 1; k < argc; k++) {
    string arg = argv[k], name = arg.substr(0, arg.find('='));
    int value = arg.find('=') == string::npos ? 0 : atoi(arg.c_str() + arg.find('=') + 1), fault = 0, rule = 0;
    while (fault < FAULTS && name != FAULT_NAMES[fault]) fault++;
    while (rule < RULE_COUNT && name != string("-") + RULE_NAMES[rule]) rule++;
    if (fault < FAULTS) budget[fault] = value;
    else if (rule < RULE_COUNT) rules &= ~(1ull << rule), title += " " + arg;
    else if (name == "tickets")
      for (int e = 0; e < N && arg[8 + e]; e++) ticket_of[e] = arg[8 + e] - '0';
    else if (name == "window") window = value;
    else if (name == "doorbell") doorbell = true;
    else if (name == "pages") pages = true;
    else if (name == "strict") strict = true;
    else if (name == "loose") loose = true;
    else if (name == "redis6") redis6 = true;
    else if (name == "eager") eager = true;
    else if (name == "all") everything = true;
    else if (name == "live") liveness = true;
    else if (name == "most") most = (size_t)value * 1000000;
    else if (name == "seconds") seconds = value;
    else if (name == "rules") {
      for (const char* text : RULE_TEXTS) puts(text);
      return 0;
    } else return fprintf(stderr, "what is %s?\n", argv[k]), 2;
  }
  State s = {};
  memset(s.best_owner, NONE, T);
  for (int x = 0; x < 2; x++) s.m[x].up = 1, forget(s.m[x]);
  for (int i = 0; i < I; i++) memset(s.c[i].runs, NONE, T);
  for (int i = 0; i < 2; i++) s.c[i].process = s.c[i].looked = 1, s.r.lease[i] = LIVE;
  for (int k = 0; k < FAULTS; k++) s.left[k] = budget[k];
  s.epoch = s.changes = 1;
  s.m[0].epoch = s.m[0].heard_epoch = s.m[0].known_changes = s.m[0].heard_changes = 1, s.m[0].at = LEADS;
  table_mask = (1 << 20) - 1;
  table.assign((size_t)table_mask + 1, 0);
  normalise(s);
  keep(s, {});
  edge_from.clear(), edge_to.clear();
  clock_t began = clock();
  auto spent = [&] { return double(clock() - began) / CLOCKS_PER_SEC; };
  u32 at = 0;
  for (; at < states.size() && violation.empty() && states.size() < most && (at % 4096 || spent() < seconds); at++) {
    current = at;
    const State here = states[at];
    for (int x = 0; x < 2; x++) lead(here, x);
    outside(here);
    for (int i = 0; i < I; i++) consume(here, i);
  }
  bool complete = at == states.size() && violation.empty();
  printf("[%s] tickets=", title.c_str());
  for (int e = 0; e < N; e++) printf("%d", ticket_of[e]);
  printf(" incarnations=%d", I);
  for (int k = 0; k < FAULTS; k++)
    if (budget[k]) printf(" %s=%d", FAULT_NAMES[k], budget[k]);
  printf("%s%s: %zu states, %llu edges, %.1f s, %s, overlaps with a deleted message %llu\n", doorbell ? " doorbell" : "",
         pages ? " pages" : "", states.size(), (unsigned long long)edges, spent(),
         !violation.empty() ? "VIOLATION" : complete ? "complete" : "TRUNCATED", (unsigned long long)tolerated);
  if (!violation.empty()) {
    print_trace(violated_at);
    printf("  >> ");
    print_step(violating, states[violated_at]);
    printf("  >> %s\n", violation.c_str());
    return 1;
  }
  return liveness && complete ? find_stuck() : 0;
}
