"""Proof that an attempt's KV is complete: which page of which layer has landed."""

from engine.link.kv_notice import KvNotice


class Arrival:
    """Counts layer-pages, each once however often it is announced.

    `complete` means the full length: every layer of every page that was reserved.
    """

    def __init__(self, num_layers: int, num_pages: int) -> None:
        self._num_pages = num_pages
        self._full = (1 << num_pages) - 1
        # One bit a page. Layers leave the list's end count when their last page is in.
        self._layers = [0] * num_layers
        self._num_missing_layers = num_layers

    @property
    def complete(self) -> bool:
        return self._num_missing_layers == 0

    def add(self, notice: KvNotice) -> None:
        """Raises ValueError for layers or pages that the attempt does not have."""
        last_layer = notice.first_layer + notice.num_layers
        last_page = notice.first_page + notice.num_pages
        if (
            min(notice.first_layer, notice.first_page, notice.num_layers, notice.num_pages) < 0
            or last_layer > len(self._layers)
            or last_page > self._num_pages
        ):
            raise ValueError(
                f"notice {notice} is outside of {len(self._layers)} layers"
                f" of {self._num_pages} pages"
            )
        mask = ((1 << notice.num_pages) - 1) << notice.first_page
        for layer in range(notice.first_layer, last_layer):
            before = self._layers[layer]
            self._layers[layer] = before | mask
            if before != self._full and self._layers[layer] == self._full:
                self._num_missing_layers -= 1
