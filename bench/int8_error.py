"""The error of products with int8 weights: ``python bench/int8_error.py [--width 4096]``.

Prints errors against float64, relative to the norm of the product, of 64 normally distributed rows and 4096 output
channels: with only the weights in 8 bits, with rows in 8 bits as well (as `ops.linear` does), and with all in bfloat16.
"""

import argparse

import torch

from dflash import ops


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096, help="elements of a row")
    width = parser.parse_args().width
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, width, generator=g), torch.randn(4096, width, generator=g)
    exact, quantized, rounded = x.double() @ weight.double().T, ops.Int8Weight.of(weight), x.bfloat16()
    products = {
        "weights in 8 bits": x.double() @ quantized.wide().double().T,
        "weights and rows in 8 bits": ops.linear(x, quantized.packed, scales=quantized.scales),
        "bfloat16": ops.linear(rounded, weight.bfloat16()),
    }
    for name, product in products.items():
        print(f"{name:<27} {100 * ((product.double() - exact).norm() / exact.norm()).item():.2f} %")


if __name__ == "__main__":
    main()
