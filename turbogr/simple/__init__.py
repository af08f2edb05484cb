"""Simple methods that recommend well without a neural network, as scorers like any model.

They are what a trained model is compared with, and what a run delivers where one of them is better on the validation
items (`turbogr.simple.delivery`).
"""
