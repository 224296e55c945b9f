"""Protocol versions: the newest common one, and refusals that name both sides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wingbeat.core.errors import RequestError, UnsupportedProtocol
from wingbeat.core.negotiation import check_answer, choose_version, read_range, write_range

RANGES = st.tuples(st.integers(1, 40), st.integers(0, 10)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(RANGES, RANGES)
def test_both_sides_agree_on_the_newest_common_version(server: tuple[int, int], client: tuple[int, int]) -> None:
    common = set(range(server[0], server[1] + 1)) & set(range(client[0], client[1] + 1))
    if common:
        chosen = choose_version(write_range(client), own=server)
        assert chosen == max(common)
        check_answer(str(chosen), own=client, where="http://here")
        return
    with pytest.raises(UnsupportedProtocol) as refused:
        choose_version(write_range(client), own=server)
    assert f"version {write_range(server)} of" in refused.value.message
    assert f"version {write_range(client)}:" in refused.value.message
    behind = "client" if client[1] < server[0] else "server"
    assert refused.value.message.endswith(f"on the {behind}")


def test_without_a_range_the_newest_version_is_meant() -> None:
    assert choose_version("", own=(2, 5)) == 5
    assert read_range(" 3 ") == (3, 3)


@pytest.mark.parametrize("text", ["", "x", "2-1", "1-", "-1", "1-2-3", "1.0", "٣", "9" * 30])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match='expected a version like "1"'):
        read_range(text)


def test_a_client_refuses_an_answer_that_it_cannot_read() -> None:
    check_answer("", where="http://here")  # a proxy may have cut it off
    for answered in ("3", "one", "-1"):
        with pytest.raises(UnsupportedProtocol, match=r"http://here answers in version .* speaks version 1-2"):
            check_answer(answered, own=(1, 2), where="http://here")
