"""Rows of a store that are written for the next commit, where nobody sees them yet."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedcore.clients.registry import ClientId
from fedcore.errors import ShapeError
from fedcore.store.committed_rows import CommittedRows
from fedcore.store.row_format import Row


class StagedRows(CommittedRows):
    """The half of a ``ClientStore`` that writes rows: into free slots, which a commit makes the clients' rows."""

    def stage(self, client: object, round: int | None = None) -> Row:
        """A slot, float32[n] or Codes of undefined content, that becomes the client's row at ``commit``.

        Whatever checksums were noted of it before are forgotten.

        Args:
            client: whose.
            round: of the row, where that is not the commit's: a row that is written anew in another form, say.

        Raises:
            UnknownClientError: no such client is registered.
            StoreError: there is no room for one more, or the store cannot be written to.
        """
        return self._stage([self._number(client)], round)[0]

    def stage_all(self, clients: Sequence[ClientId], round: int | None = None) -> list[Row]:
        """``stage`` for many clients, in their order; after an error some are staged, which ``discard`` forgets."""
        return self._stage(self._numbers(clients).tolist(), round)

    def _stage(self, numbers: Sequence[int], round: int | None) -> list[Row]:
        rows, form = self._content.rows, self._content.form
        if rows.staged:
            self._session.require_writer()
        else:
            self._session.require_right()  # asked once a round
        rows.make_room(max(numbers, default=-1), self.registry.capacity)
        slots = [rows.stage(number, round) for number in numbers]
        if self._residency is not None:
            for slot in slots:
                self._residency.use(slot)
        return [form.row(rows.slots.memory(slot)) for slot in slots]

    def room_for_checksums(self, rows: int) -> npt.NDArray[np.uint64] | None:
        """Memory for the checksums of so many rows, for ``kernels.exchange`` and then for ``note_checksums``.

        None where nobody asks for them: a store in memory keeps none, and rows through a codec are read at the commit.
        """
        if self._folder is None or self._content.form.codec != "f32":
            return None
        return np.empty((rows, self._content.rows.slots.geometry.blocks), np.uint64)

    def note_checksums(self, clients: Sequence[ClientId], checksums: npt.NDArray[np.uint64]) -> None:
        """Note the checksums of staged rows as they lie now, so that ``commit`` does not read those rows.

        They are believed, and a row that is no longer what they say would be found damaged. ``stage`` forgets them: who
        writes to a row once more stages it once more, and no longer writes to what ``stage`` returned before.

        Args:
            clients: whose; a row that is not staged counts for nothing.
            checksums: uint64[k, blocks], each row's by ``checksums(row, 65536)``. Read-only.

        Raises:
            ShapeError, UnknownClientError: an argument is not what is said above; nothing was noted.
        """
        due, rows = (len(clients), self._content.rows.slots.geometry.blocks), self._content.rows
        if checksums.dtype != np.uint64 or checksums.shape != due:
            got = f"{checksums.dtype}{list(checksums.shape)}"
            raise ShapeError(f"checksums: expected uint64{list(due)}, got {got}")
        for number, sums in zip(self._numbers(clients).tolist(), checksums.copy(), strict=True):
            rows.note_sums(number, sums)

    def unstage(self, client: object) -> None:
        """Forget the client's staged row, if there is one."""
        self._content.rows.unstage(self._number(client))

    def discard(self) -> None:
        """Forget every staged row."""
        self._content.rows.discard()
