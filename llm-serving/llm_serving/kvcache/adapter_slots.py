"""Assignment of LoRA adapters to the adapter slots of a WorkAgent."""

from __future__ import annotations

from collections.abc import Iterable

from llm_serving.core.request import Request


class AdapterSlots:
    """The LoRA adapter in each slot of a WorkAgent, and the running requests that use it.

    Empty slots are filled first, then the one unused for longest; an adapter in use is never replaced. A step fills at
    most one slot, so running requests wait for the copy of at most one adapter. The WorkAgent copies an adapter when a
    step names one that is not in its slot (`StepInput.adapters`).
    """

    def __init__(self, num_slots: int) -> None:
        self._adapters = [0] * num_slots
        self._free = list(range(num_slots))
        self._users: dict[int, int] = {}
        self._filled_step = -1

    @property
    def num_slots(self) -> int:
        return len(self._adapters)

    def slot_of(self, adapter: int) -> int:
        return self._adapters.index(adapter)

    def waits_for_a_step(self, request: Request, step: int) -> bool:
        return self._filled_step == step and request.adapter not in self._adapters

    def has_room_for(self, request: Request, without: Iterable[Request] = ()) -> bool:
        """Return whether the request's adapter has or could get a slot after preempting the requests in `without`."""
        if request.adapter in self._adapters or self._free:
            return True
        freed = [each.adapter for each in without]
        return any(freed.count(adapter) == count for adapter, count in self._users.items())

    def acquire(self, request: Request, step: int) -> None:
        """Record that a request runs with its adapter. The caller must have checked `has_room_for`."""
        adapter = request.adapter
        if adapter not in self._adapters:
            slot = next((each for each in self._free if not self._adapters[each]), self._free[0])
            self._adapters[slot] = adapter
            self._filled_step = step
        if adapter not in self._users:
            self._free.remove(self.slot_of(adapter))
            self._users[adapter] = 0
        self._users[adapter] += 1

    def release(self, request: Request) -> None:
        self._users[request.adapter] -= 1
        if not self._users[request.adapter]:
            del self._users[request.adapter]
            self._free.append(self.slot_of(request.adapter))

    def release_all(self) -> None:
        for adapter in self._users:
            self._free.append(self.slot_of(adapter))
        self._users.clear()

    def check_integrity(self, running: Iterable[Request]) -> None:
        users = [each.adapter for each in running if each.adapter]
        assert self._users == {adapter: users.count(adapter) for adapter in users}
        used = sorted(self.slot_of(adapter) for adapter in self._users)
        assert sorted([*used, *self._free]) == list(range(self.num_slots)), "a slot is both free and used, or neither"
