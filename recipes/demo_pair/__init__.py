"""Train the demo pair that ships with the package: ``python -m recipes.demo_pair FOLDER``."""
