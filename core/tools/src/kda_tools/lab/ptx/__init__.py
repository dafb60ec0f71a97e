"""A small PTX machine: what compilers make for sm_90a, executed thread by thread on a CPU.

    parse.py         PTX text -> `Program`: parameters, shared memory, instructions with typed operands
    run.py           what a run is made of: grid, tensors, the kernel ahead, what the ISA leaves open
    machine.py       the threads of a grid in lockstep: divergence, scheduling
    memory.py        what threads reach, with every access checked, and races
    synchronise.py   who waits for whom: warps, barriers, mbarriers, asynchronous copies; deadlocks
    decode.py        from an instruction to what executes it
    arithmetic.py, moving.py, cooperating.py, atomics.py   the instructions; floats.py: how floats are rounded
    kernels.py       how a solution's Triton launch becomes a run; cute.py: how a CuTe DSL kernel does
    plugin.py        the tasks' own kernel tests on the machine

A register is a numpy array over the threads of as many whole clusters as run at a time. Nothing is skipped: an
instruction, modifier or special register that is not known is an error with its line. New ones are added where a
compiler first emits them, with a line in `core/tools/tests/test_ptx_machine.py`.

What it cannot show: it runs few schedules of the many, and finds a race by the order that barriers give, in shared
memory only; it knows no weak order of memory, no limit of registers, no time.
"""
