// The mailbox barrier, the program's guard, and the greeting at creation.
#include "ffi/cuda/kernels.h"
#include "ffi/cuda/meet.cuh"

namespace symmkv {
namespace {

//   writer  Thread r of rank s stores arrive word s of rank r's slab, with release: everything that
//           earlier kernels of the stream published comes before it.
//   reader  Thread r then polls arrive word r of the own slab, with acquire.
//   reuse   Epochs only grow and no word is ever reset, so a late reader can't miss one.
__global__ void __launch_bounds__(kMaxRanks)
    BarrierKernel(const __grid_constant__ DeviceHeap heap) {
  const HeapState state = LoadState(heap);
  if (state.status != kOpen) return;
  const uint64_t exchange = state.epoch + 1;
  const uint16_t fingerprint = state.published_epoch == exchange
                                   ? FoldFingerprint(state.published_fingerprint)
                                   : uint16_t{0};
  Arrive(heap, exchange, fingerprint);
  AwaitArrivals(heap, exchange, fingerprint, Phase::kBarrier);
  __syncthreads();  // every thread has read the epoch
  if (threadIdx.x == 0) heap.state->epoch = exchange;
}

__global__ void NewTicketKernel(const __grid_constant__ DeviceHeap heap,
                                const int32_t* axis_index) {
  const int32_t index = *axis_index;
  if (index < 0 || static_cast<uint32_t>(index) == heap.rank || Status(heap) != kOpen) return;
  Fault fault = MakeFault(FaultCode::kWrongIndex, Phase::kTicket, heap.rank, heap.state->epoch + 1);
  fault.value = index;
  Fail(heap, fault);
}

__global__ void GreetKernel(const __grid_constant__ DeviceHeap heap, uint64_t* nonces) {
  const uint32_t peer = threadIdx.x;
  if (peer >= heap.layout.geometry.cp_size) return;
  const uint64_t nonce = LoadAcquire(&reinterpret_cast<const SlabHeader*>(heap.slab[peer])->nonce);
  nonces[peer] = nonce;
  StoreRelease(&MailboxOf(heap, peer, heap.rank)->greeting, nonce);
}

__global__ void DelayKernel(uint64_t delay_ns) {
  const uint64_t until_ns = NowNs() + delay_ns;
  while (NowNs() < until_ns) __nanosleep(1000);
}

}  // namespace

void LaunchBarrier(const DeviceHeap& heap, cudaStream_t stream) {
  BarrierKernel<<<1, kMaxRanks, 0, stream>>>(heap);
}

void LaunchNewTicket(const DeviceHeap& heap, const int32_t* axis_index, cudaStream_t stream) {
  NewTicketKernel<<<1, 1, 0, stream>>>(heap, axis_index);
}

void LaunchGreet(const DeviceHeap& heap, uint64_t* nonces, cudaStream_t stream) {
  GreetKernel<<<1, kMaxRanks, 0, stream>>>(heap, nonces);
}

void LaunchDelay(uint64_t delay_us, cudaStream_t stream) {
  DelayKernel<<<1, 1, 0, stream>>>(1000 * delay_us);
}

cudaError_t LoadBarrierKernels() {
  for (const void* kernel :
       {reinterpret_cast<const void*>(BarrierKernel),
        reinterpret_cast<const void*>(NewTicketKernel), reinterpret_cast<const void*>(GreetKernel),
        reinterpret_cast<const void*>(DelayKernel)}) {
    if (const cudaError_t error = LoadKernel(kernel); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace symmkv
