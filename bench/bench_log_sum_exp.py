"""``ops.log_sum_exp`` against torch's: the denominators of 16 rows' log probabilities."""

from harness import Case, main

from dflash import ops

ROWS = 16


def plain(logits):
    return logits.float().logsumexp(-1)


def cases(o):
    for m in o.models.values():
        yield Case(
            f"vocab={m.vocab}",
            lambda m=m: (o.random(1, ROWS, m.vocab, scale=3.0),),
            ops.log_sum_exp,
            {"logsumexp": plain},
            ROWS * (m.vocab * o.size + 4),
        )


if __name__ == "__main__":
    main(cases)
