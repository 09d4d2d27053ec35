"""What memory a model holds."""

from torch import Tensor, nn


def storages(model: nn.Module) -> dict[int, int]:
    """Return address and size of every storage that anything in a model holds, quantization state included."""
    found, seen, todo = {}, set(), [model]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, type):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            flatten = getattr(value, "__tensor_flatten__", None)  # of tensors that compute from others
            if flatten is not None:
                todo += [getattr(value, name) for name in flatten()[0]]
            else:
                found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, (list, tuple, set)):
            todo += value
        todo += getattr(value, "__dict__", {}).values()
    return found
