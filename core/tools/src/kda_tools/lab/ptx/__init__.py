"""A small PTX machine: what compilers make for sm_90a, executed thread by thread on a CPU.

    parse.py         PTX text -> `Program`: parameters, shared memory, instructions with typed operands
    run.py           what a run is made of: grid, tensors, the previous kernel, what the ISA leaves open
    machine.py       the threads of a grid in lockstep: divergence, scheduling
    memory.py        the memory of threads, with every access checked, and races
    synchronise.py   where threads wait: warps, barriers, mbarriers, asynchronous copies; deadlocks
    decode.py        instructions to functions that execute them
    arithmetic.py, moving.py, cooperating.py, atomics.py   the instructions; floats.py: how floats are rounded
    kernels.py       a solution's Triton launch as a run; cute.py: a CuTe DSL kernel as a run
    plugin.py        the tasks' own kernel tests on the machine

The kernel ahead is the one before this kernel in the stream, the kernel behind is the next one.

A register is a numpy array over the threads of as many whole clusters as run at a time. Nothing is skipped: an
instruction, modifier or special register that is not known is an error with its line. New ones are added when a
compiler first emits them, with a line in `core/tools/tests/test_ptx_machine.py`.

Limits: it runs few of the many schedules. It finds races by the order that barriers give, in shared memory only. It
models no weak memory order, no limit of registers, no time.
"""
