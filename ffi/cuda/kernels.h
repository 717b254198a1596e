// The kernels, one launch each. All are asynchronous and fit for capture into a CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/cuda/device_heap.h"

namespace symmkv {

// The program's guard: checks the device's index along the program's axis, -1 for none.
void LaunchNewTicket(const DeviceHeap& heap, const int32_t* axis_index, cudaStream_t stream);
void LaunchPublish(const DeviceHeap& heap, const DeviceBatch& batch, cudaStream_t stream);
void LaunchBarrier(const DeviceHeap& heap, cudaStream_t stream);
void LaunchGather(const DeviceHeap& heap, const DeviceBatch& batch, cudaStream_t stream);
// The three in one launch.
void LaunchExchange(const DeviceHeap& heap, const DeviceBatch& batch, cudaStream_t stream);

// Reads every peer's nonce through the mapping, into nonces[cp_size]; writes it back as greeting.
void LaunchGreet(const DeviceHeap& heap, uint64_t* nonces, cudaStream_t stream);
// Occupies the stream; for tests.
void LaunchDelay(uint64_t delay_us, cudaStream_t stream);

// Load every kernel onto the current device: CUDA does so lazily otherwise, which can wait for a
// kernel that itself waits for a peer.
cudaError_t LoadBarrierKernels();
cudaError_t LoadPagesKernels();
cudaError_t LoadExchangeKernels();
// Most blocks of an exchange on the current device: other kernels, NCCL's too, must find room.
cudaError_t MaxExchangeBlocks(uint32_t* num_blocks);

}  // namespace symmkv
