"""`kda fleet`: benches, grids, sweeps, adversaries and models over all GPUs of a Ray cluster.

`plan_pieces` splits the work, `drive` hands it out through a `Pool` (`ray_pool`), each piece runs as a process of its
own (`piece_process`), `run_folder` keeps the results, `deliver` appends them to the logs of the tasks.
"""
