"""How the pair inside the package was made: ``python -m dflash.train.demo_pair FOLDER`` makes it again."""
