import os

# Tensors of 2 MiB and more on the CPU come in huge pages where the system has them: else the system spends longer on giving 4 KiB
# at a time than a kernel does on filling them. Torch asks at its first tensor, which is one of the checks of a configuration.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
