"""One policy trained by several processes, a device each: data parallel, weights and moments sharded (FSDP2).

- :mod:`~wingbeat.trainer.distributed.world`: who the processes are, and how they talk
- :mod:`~wingbeat.trainer.distributed.balance`: which rows each of them forwards
- :mod:`~wingbeat.trainer.distributed.shared_rows`: what each of them found, put together
- :mod:`~wingbeat.trainer.distributed.fsdp`: weights gathered, gradients summed
- :mod:`~wingbeat.trainer.distributed.rank`: the trainer of one of them
"""
