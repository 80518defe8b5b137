// What compute-sanitizer reports though it is right, as the Hopper kernels do it:
//
//     nvcc -arch=sm_90a -o limits sanitizer_limits.cu
//     compute-sanitizer --tool racecheck ./limits ring        3 hazards: one lane lets a place go for its warp
//     compute-sanitizer --tool racecheck ./limits each        none: every lane does so for itself
//     compute-sanitizer --tool initcheck ./limits store       memory that the copy engine wrote counts as never written
#include <cstdint>
#include <cstdio>
#include <cstring>

__device__ uint32_t shared_address(const void* at) { return uint32_t(__cvta_generic_to_shared(at)); }
__device__ void init(uint64_t* bar, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals) : "memory");
}
__device__ void arrive(uint64_t* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
__device__ void wait(uint64_t* bar, int parity) {
    asm volatile("{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra WAIT;\n}" ::"r"(
                     shared_address(bar)),
                 "r"(parity)
                 : "memory");
}

// One thread has four tiles loaded into the same place, each when 128 others have read the one before.
template <bool EACH> __global__ void ring(const float* from, float* sums) {
    __shared__ alignas(128) float tile[128];
    __shared__ uint64_t full, free_again;
    if (threadIdx.x == 0) {
        init(&full, 1);
        init(&free_again, EACH ? 128 : 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x == 128) {
        for (int i = 0; i < 4; i++) {
            wait(&free_again, i % 2 ^ 1);
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 512;" ::"r"(shared_address(&full)) : "memory");
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 512, [%2];" ::"r"(
                             shared_address(tile)),
                         "l"(from + i * 128), "r"(shared_address(&full))
                         : "memory");
        }
    } else if (threadIdx.x < 128) {
        float sum = 0;
        for (int i = 0; i < 4; i++) {
            wait(&full, i % 2);
            sum += tile[(threadIdx.x + 1) % 128];
            __syncwarp();
            if (EACH || threadIdx.x % 32 == 0) arrive(&free_again);
        }
        sums[threadIdx.x] = sum;
    }
}

__global__ void store(float* to) {
    __shared__ alignas(128) float tile[128];
    tile[threadIdx.x] = threadIdx.x;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 512;" ::"l"(to), "r"(shared_address(tile)) : "memory");
        asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
    }
}
__global__ void read(const float* from, float* to) { to[threadIdx.x] = from[threadIdx.x]; }

int main(int count, char** arguments) {
    const char* what = count > 1 ? arguments[1] : "ring";
    float numbers[512], *from, *to;
    for (int i = 0; i < 512; i++) numbers[i] = float(i);
    cudaMalloc(&from, sizeof numbers);
    cudaMalloc(&to, 512);
    if (!strcmp(what, "store")) {
        store<<<1, 128>>>(from);
        read<<<1, 128>>>(from, to);
    } else {
        cudaMemcpy(from, numbers, sizeof numbers, cudaMemcpyHostToDevice);
        if (!strcmp(what, "each")) ring<true><<<1, 160>>>(from, to);
        else ring<false><<<1, 160>>>(from, to);
    }
    cudaMemcpy(numbers, to, 512, cudaMemcpyDeviceToHost);
    printf("%s: %g, %s\n", what, numbers[0], cudaGetErrorString(cudaGetLastError()));
}
