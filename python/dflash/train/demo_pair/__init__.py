"""Train the demo pair that ships with the package: ``python -m dflash.train.demo_pair FOLDER``."""
