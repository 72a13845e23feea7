from __future__ import annotations

from usher.common.base.callables import unawaitable_reason
from usher.common.base.text import info_lines, json_safe, label
from usher.common.protocol.keys import uid_key, waiting_key
from usher.common.protocol.sources import is_pattern, is_work_stream
from usher.common.protocol.stream_id import is_id
from usher.common.protocol.ticket_states import due_ms_of, is_given_back
from usher.common.redis.endpoints import mode
from usher.common.runtime.settings import _url


def test_forms_that_others_rely_on() -> None:
    assert uid_key("ticket_stream", b"order-7") == b"{ticket_stream}:uid:order-7"
    assert waiting_key("ticket_stream", "g", b"42") == b"{ticket_stream}:waiting:g:42"
    assert (is_pattern("tickets:*"), is_pattern("orders")) == (True, False)
    names = ("usher:{g}", "usher:g{7}", "usher:{h}", "orders")
    assert [is_work_stream(name, "g") for name in names] == [True, True, False, False]
    assert [is_id(one) for one in ("5-10", "5", "18446744073709551616-0", "5-10\n")] == [True, False, False, False]
    assert [due_ms_of(one) for one in (b"waits@1790000000000", b"returned", b"waits:7")] == [1790000000000, None, None]
    assert [is_given_back(one) for one in (b"waits@1790000000000", b"returned", b"halted")] == [True, True, False]
    urls = ("rediss+cluster://host:6379", "redis+sentinel://host:26379/usher", "unix:///tmp/s")
    assert [*map(mode, urls)] == ["redis+cluster", "redis+sentinel", "unix"]
    assert (_url("http://fd00::5:8721"), _url("http://a:1/a")) == ("http://[fd00::5]:8721", "http://a:1/a")
    assert (label("bad"), label("handed_over"), json_safe("a\udcff")) == ("Critical", "handed over", "a\\xff")
    assert info_lines(b"# Memory\r\nmaxmemory:0\r\n") == {"maxmemory": "0"}
    assert (unawaitable_reason(print), unawaitable_reason(Exception).partition(":")[0]) == ("", "a class")
