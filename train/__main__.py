"""`python -m train VERB ...`, for a checkout in which nothing is installed."""

from train.cli import run

run()
