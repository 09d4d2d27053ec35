"""``--table``: where the time of our step goes, with the target's own forward and with its layers on our ops."""

from .ours import another
from .profiles import Sizes, kernel_table, op_table, profiled, show_tables
from .report import Report
from .setting import Run, Setting


def tables(setting: Setting, runs: dict[str, Run], accepted: int, report: Report, copy: float) -> None:
    """Profile ``graph`` and ``fused``, print their tables and put them into the report.

    Args:
        setting: context and batch.
        runs: the runners that work there.
        accepted: tokens per step, as forced.
        report: gets the tables.
        copy: bandwidth of a large copy, bytes per second.
    """
    target, drafter, _ = setting.pair
    config, device = target.config, target.device
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    features = heads * config.head_dim
    sizes = Sizes(drafter.dtype.itemsize, setting.context, features)
    found = report.facts["tables"] = {}
    for runner in ("graph", "fused"):
        if runner not in runs:
            continue
        try:
            kernels = kernel_table(profiled(runs[runner], accepted, device))
            eager = another(setting, "eager", fused=runner == "fused")
            profiler = profiled(eager, accepted, device, shapes=True)
        except Exception as error:
            report.leave_out(f"{runner}'s table", setting, error)
            continue
        ops = op_table(profiler, sizes, copy)
        found[runner] = {"kernels": kernels, "ops": ops}
        show_tables(runner, kernels, ops, report.facts["overlap"])
    report.write()
