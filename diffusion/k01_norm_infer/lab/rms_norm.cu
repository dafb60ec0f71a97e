// y = x / sqrt(mean(x^2) + eps) * w over each row, float32 inside: one block a row, which stays in registers.
//
// Macros: ELEMENT (the type of x, y and w), COLUMNS (a multiple of a 16-byte vector), THREADS (whole warps).

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

namespace {

constexpr int kVector = 16 / sizeof(ELEMENT);
constexpr int kVectors = COLUMNS / kVector;
constexpr int kTurns = (kVectors + THREADS - 1) / THREADS;
constexpr int kWarps = THREADS / 32;
static_assert(COLUMNS % kVector == 0, "a row is whole vectors");
static_assert(THREADS % 32 == 0, "a block is whole warps");

union Pack {
  uint4 bits;
  ELEMENT values[kVector];
};

__device__ float sum_of_block(float value) {
  __shared__ float sums[kWarps];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  if (kWarps == 1) return value;
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0.f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) value += sums[warp];
  return value;
}

}  // namespace

__global__ void __launch_bounds__(THREADS)
    rms_norm_kernel(uint4* __restrict__ y, const uint4* __restrict__ x, const uint4* __restrict__ w, float eps) {
  const size_t row = static_cast<size_t>(blockIdx.x) * kVectors;
  Pack kept[kTurns];
  float squares = 0.f;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int place = turn * THREADS + threadIdx.x;
    if (place >= kVectors) continue;
    kept[turn].bits = x[row + place];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float value = static_cast<float>(kept[turn].values[i]);
      squares += value * value;
    }
  }
  const float inverse = rsqrtf(sum_of_block(squares) / COLUMNS + eps);
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int place = turn * THREADS + threadIdx.x;
    if (place >= kVectors) continue;
    Pack weight, out;
    weight.bits = w[place];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float value = static_cast<float>(kept[turn].values[i]) * inverse;
      out.values[i] = static_cast<ELEMENT>(value * static_cast<float>(weight.values[i]));
    }
    y[row + place] = out.bits;
  }
}

// y and x: [rows, COLUMNS], contiguous; w: [COLUMNS]; all of them ELEMENT, 16-byte aligned, on one GPU.
void RmsNorm(tvm::ffi::TensorView y, tvm::ffi::TensorView x, tvm::ffi::TensorView w, double eps) {
  const DLDevice device = x.device();
  const auto rows = static_cast<unsigned>(x.numel() / COLUMNS);
  const auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  rms_norm_kernel<<<rows, THREADS, 0, stream>>>(
      static_cast<uint4*>(y.data_ptr()), static_cast<const uint4*>(x.data_ptr()),
      static_cast<const uint4*>(w.data_ptr()), static_cast<float>(eps));
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << "rms_norm_kernel: " << cudaGetErrorString(error);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm, RmsNorm);
