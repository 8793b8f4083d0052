"""The demo: a byte-level language model trained with BF16 attention, then evaluated and fine-tuned with FP4.

data -> model -> train -> summary -> report, plot. fidelity measures dV of a single head, cli is the command.
"""
