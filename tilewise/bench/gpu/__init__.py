"""The GPU suite: our CUDA kernels beside their peers in one process, in interleaved rounds. `tilewise bench --gpu`."""
