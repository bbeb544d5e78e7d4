"""The base of our dispatch modes, which nothing that is compiled ever runs under."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class EagerMode(TorchDispatchMode):
    """A dispatch mode whose methods are not kept from ``torch.compile``.

    Otherwise each of its operations would go through ``torch._disable_dynamo``, and the first import all of ``torch._dynamo``,
    which takes more than a second.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
