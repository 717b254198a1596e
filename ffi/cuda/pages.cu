// publish and gather: whole pages between the dense buffers and staging, by pull. Neither waits.
#include "ffi/cuda/batch.cuh"
#include "ffi/cuda/kernels.h"
#include "ffi/cuda/meet.cuh"

namespace symmkv {
namespace {

constexpr uint32_t kThreads = 512;
// A page is cut into stripes, so that a batch of few pages still gives every block work.
constexpr uint64_t kStripeNbytes = 16 << 10;

// Visits this block's stripes of the batch: visit(slot index, Slot, buffer, offset in the page,
// nbytes).
template <class Visit>
__device__ inline void ForEachStripe(const DeviceHeap& heap, const DeviceBatch& batch, Phase phase,
                                     const Turn& turn, Visit visit) {
  const Geometry& geometry = heap.layout.geometry;
  for (uint32_t b = 0; b < geometry.num_buffers; ++b) {
    const uint64_t page_nbytes = geometry.page_nbytes[b];
    const uint32_t stripes =
        static_cast<uint32_t>((page_nbytes + kStripeNbytes - 1) / kStripeNbytes);
    const int64_t count = static_cast<int64_t>(turn.num_current) * stripes;
    for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
      const int32_t index = static_cast<int32_t>(i / stripes);
      const uint64_t offset = static_cast<uint64_t>(i % stripes) * kStripeNbytes;
      const uint64_t left = page_nbytes - offset;
      const Slot slot = ReadSlot(heap, batch, phase, turn.epoch, index);
      if (slot.writer >= 0)
        visit(index, slot, b, offset, left < kStripeNbytes ? left : kStripeNbytes);
    }
  }
}

__device__ inline Turn BeginTurn(const DeviceHeap& heap, const DeviceBatch& batch, Phase phase) {
  __shared__ Turn turn;
  if (threadIdx.x == 0) {
    turn = ReadTurn(heap, batch);
    CheckCount(heap, batch, phase, &turn);
  }
  __syncthreads();
  return turn;
}

// Writes the own pages into the half of the exchange to come. Its last readers were the gathers two
// exchanges ago, and their ranks have signalled the exchange in between after them. The barrier's
// release makes the pages visible.
__global__ void __launch_bounds__(kThreads)
    PublishKernel(const __grid_constant__ DeviceHeap heap,
                  const __grid_constant__ DeviceBatch batch) {
  const Turn turn = BeginTurn(heap, batch, Phase::kPublish);
  if (turn.status != kOpen) return;
  const uint64_t exchange = turn.epoch + 1;
  ForEachStripe(
      heap, batch, Phase::kPublish, turn,
      [&](int32_t index, const Slot& slot, uint32_t b, uint64_t offset, uint64_t nbytes) {
        if (slot.writer != static_cast<int32_t>(heap.rank)) return;
        char* const staged =
            heap.slab[heap.rank] + heap.layout.geometry.SlotOffset(exchange, b, index) + offset;
        CopyGranules(DensePage(heap, batch, b, slot.page) + offset, nbytes, threadIdx.x, kThreads,
                     [&](uint32_t i, const uint4& v) { reinterpret_cast<uint4*>(staged)[i] = v; });
      });
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  if (turn.published_epoch == exchange) {
    Fail(heap, MakeFault(FaultCode::kPublishedTwice, Phase::kPublish, heap.rank, exchange));
  }
  heap.state->published_epoch = exchange;
  heap.state->published_fingerprint = turn.fingerprint;
}

// Nothing, or why a gather can't follow what came before it.
__device__ inline FaultCode Misuse(const Turn& turn) {
  if (turn.published_epoch > turn.epoch) return FaultCode::kNotMet;
  if (turn.published_epoch != turn.epoch || turn.epoch == 0) return FaultCode::kNotPublished;
  if (turn.published_fingerprint != turn.fingerprint) return FaultCode::kOtherPlan;
  return FaultCode::kNone;
}

// Reads the peers' pages of the exchange just met; on a poisoned heap, marks them as lost.
__global__ void __launch_bounds__(kThreads)
    GatherKernel(const __grid_constant__ DeviceHeap heap,
                 const __grid_constant__ DeviceBatch batch) {
  const Turn turn = BeginTurn(heap, batch, Phase::kGather);
  if (turn.status == kGone) return;
  const FaultCode misuse = Misuse(turn);
  const bool lost = turn.status != kOpen || misuse != FaultCode::kNone;
  if (misuse != FaultCode::kNone && blockIdx.x == 0 && threadIdx.x == 0) {
    Fail(heap, MakeFault(misuse, Phase::kGather, heap.rank, turn.epoch + 1));
  }
  ForEachStripe(
      heap, batch, Phase::kGather, turn,
      [&](int32_t index, const Slot& slot, uint32_t b, uint64_t offset, uint64_t nbytes) {
        if (slot.writer == static_cast<int32_t>(heap.rank)) return;
        char* const page = DensePage(heap, batch, b, slot.page) + offset;
        if (lost) return FillLost(page, nbytes, threadIdx.x, kThreads);
        const char* const staged =
            heap.slab[slot.writer] + heap.layout.geometry.SlotOffset(turn.epoch, b, index) + offset;
        CopyGranules(staged, nbytes, threadIdx.x, kThreads,
                     [&](uint32_t i, const uint4& v) { reinterpret_cast<uint4*>(page)[i] = v; });
      });
}

uint32_t NumMultiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return static_cast<uint32_t>(count);
}

}  // namespace

void LaunchPublish(const DeviceHeap& heap, const DeviceBatch& batch, cudaStream_t stream) {
  PublishKernel<<<2 * NumMultiprocessors(), kThreads, 0, stream>>>(heap, batch);
}

void LaunchGather(const DeviceHeap& heap, const DeviceBatch& batch, cudaStream_t stream) {
  GatherKernel<<<2 * NumMultiprocessors(), kThreads, 0, stream>>>(heap, batch);
}

cudaError_t LoadPagesKernels() {
  const cudaError_t error = LoadKernel(reinterpret_cast<const void*>(PublishKernel));
  return error != cudaSuccess ? error : LoadKernel(reinterpret_cast<const void*>(GatherKernel));
}

}  // namespace symmkv
