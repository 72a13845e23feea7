"""Test your handlers: messages without Redis, and everything from ``XADD`` to the dead letter in one process.

    from usher.testing import message

    def test_an_order_without_a_price_is_given_up():
        with pytest.raises(GiveUp):
            handle(message("42", kind="paid", attempt=2))

The pytest fixture ``usher_kit`` makes a ``Kit`` on an embedded Redis (docs/testing.md).
"""

from __future__ import annotations

from usher.deploy.testkit.kit import Call, Kit, message

__all__ = ["Call", "Kit", "message"]
