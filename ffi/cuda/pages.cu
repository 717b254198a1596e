// publish and gather: whole pages between the dense buffers and staging, by pull. Neither waits.
#include <algorithm>

#include "ffi/cuda/batch.cuh"
#include "ffi/cuda/kernels.h"
#include "ffi/cuda/meet.cuh"

namespace symmkv {
namespace {

// A page is cut into stripes, of kLoadsInFlight granules a thread or a little less. Blocks are many
// and small, so that the stripes of a batch spread evenly over the multiprocessors.
constexpr uint32_t kThreads = 256;
constexpr uint32_t kBlocksPerMultiprocessor = 6;
constexpr uint32_t kStripeGranules = kThreads * kLoadsInFlight;

constexpr uint32_t NumGranules(uint64_t nbytes) {
  return static_cast<uint32_t>(nbytes / kPageGranuleNbytes);
}
constexpr uint32_t NumStripes(uint64_t page_nbytes) {
  return (NumGranules(page_nbytes) + kStripeGranules - 1) / kStripeGranules;
}
constexpr uint32_t NumStripesOfSlot(const Geometry& geometry) {
  uint32_t stripes = 0;
  for (uint32_t b = 0; b < geometry.num_buffers; ++b)
    stripes += NumStripes(geometry.page_nbytes[b]);
  return stripes;
}

// A stripe of the batch: number `part` of a slot's, over all buffers.
struct Stripe {
  uint32_t per_slot;
  int64_t index;  // of the slot
  uint32_t part;
};

__device__ inline Stripe FirstStripe(const Geometry& geometry) {
  const uint32_t per_slot = NumStripesOfSlot(geometry);
  return Stripe{per_slot, blockIdx.x / per_slot, blockIdx.x % per_slot};
}

// This block's next.
__device__ inline Stripe NextStripe(Stripe stripe) {
  stripe.index += gridDim.x / stripe.per_slot;
  stripe.part += gridDim.x % stripe.per_slot;
  if (stripe.part >= stripe.per_slot) {
    stripe.part -= stripe.per_slot;
    ++stripe.index;
  }
  return stripe;
}

// Visits this block's stripes of the batch: visit(slot index, Slot, buffer, offset in the page,
// nbytes). `slot` is the first stripe's; those of the others are loaded one stripe ahead.
template <class Visit>
__device__ inline void ForEachStripe(const DeviceHeap& heap, const DeviceBatch& batch, Phase phase,
                                     const Turn& turn, Stripe stripe, Slot slot, Visit visit) {
  const Geometry& geometry = heap.layout.geometry;
  while (stripe.index < turn.num_current) {
    const Stripe next = NextStripe(stripe);
    const Slot next_slot = LoadSlot(batch, next.index);
    const int32_t index = static_cast<int32_t>(stripe.index);
    const Slot checked = CheckSlot(heap, batch, phase, turn.epoch, index, slot);
    if (checked.writer >= 0) {
      uint32_t b = 0, part = stripe.part, stripes = NumStripes(geometry.page_nbytes[0]);
      while (part >= stripes) {
        part -= stripes;
        stripes = NumStripes(geometry.page_nbytes[++b]);
      }
      const uint32_t granules = NumGranules(geometry.page_nbytes[b]);
      const uint32_t each = (granules + stripes - 1) / stripes;
      // Rounding up can leave nothing for the last ones.
      if (const uint32_t first = part * each; first < granules) {
        visit(index, checked, b, uint64_t{first} * kPageGranuleNbytes,
              uint64_t{min(each, granules - first)} * kPageGranuleNbytes);
      }
    }
    stripe = next;
    slot = next_slot;
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
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    PublishKernel(const __grid_constant__ DeviceHeap heap,
                  const __grid_constant__ DeviceBatch batch) {
  const Stripe stripe = FirstStripe(heap.layout.geometry);
  const Slot slot = LoadSlot(batch, stripe.index);  // in flight together with the turn
  const Turn turn = BeginTurn(heap, batch, Phase::kPublish);
  if (turn.status != kOpen) return;
  const uint64_t exchange = turn.epoch + 1;
  ForEachStripe(
      heap, batch, Phase::kPublish, turn, stripe, slot,
      [&](int32_t index, const Slot& checked, uint32_t b, uint64_t offset, uint64_t nbytes) {
        if (checked.writer != static_cast<int32_t>(heap.rank)) return;
        char* const staged =
            heap.slab[heap.rank] + heap.layout.geometry.SlotOffset(exchange, b, index) + offset;
        CopyGranules(DensePage(heap, batch, b, checked.page) + offset, nbytes, threadIdx.x,
                     kThreads,
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
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    GatherKernel(const __grid_constant__ DeviceHeap heap,
                 const __grid_constant__ DeviceBatch batch) {
  const Stripe stripe = FirstStripe(heap.layout.geometry);
  const Slot slot = LoadSlot(batch, stripe.index);  // in flight together with the turn
  const Turn turn = BeginTurn(heap, batch, Phase::kGather);
  if (turn.status == kGone) return;
  const FaultCode misuse = Misuse(turn);
  const bool lost = turn.status != kOpen || misuse != FaultCode::kNone;
  if (misuse != FaultCode::kNone && blockIdx.x == 0 && threadIdx.x == 0) {
    Fail(heap, MakeFault(misuse, Phase::kGather, heap.rank, turn.epoch + 1));
  }
  ForEachStripe(
      heap, batch, Phase::kGather, turn, stripe, slot,
      [&](int32_t index, const Slot& checked, uint32_t b, uint64_t offset, uint64_t nbytes) {
        if (checked.writer == static_cast<int32_t>(heap.rank)) return;
        char* const page = DensePage(heap, batch, b, checked.page) + offset;
        if (lost) return FillLost(page, nbytes, threadIdx.x, kThreads);
        const char* const staged = heap.slab[checked.writer] +
                                   heap.layout.geometry.SlotOffset(turn.epoch, b, index) + offset;
        CopyGranules(staged, nbytes, threadIdx.x, kThreads,
                     [&](uint32_t i, const uint4& v) { reinterpret_cast<uint4*>(page)[i] = v; });
      });
}

// As many blocks as there is room for at a time, and no more than the heap's slots can give work.
uint32_t NumBlocks(const DeviceHeap& heap) {
  int device = 0, multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const Geometry& geometry = heap.layout.geometry;
  const uint64_t resident = static_cast<uint64_t>(multiprocessors) * kBlocksPerMultiprocessor;
  return static_cast<uint32_t>(std::min(resident, geometry.num_slots * NumStripesOfSlot(geometry)));
}

}  // namespace

void LaunchPublish(const DeviceHeap& heap, const DeviceBatch& batch, cudaStream_t stream) {
  PublishKernel<<<NumBlocks(heap), kThreads, 0, stream>>>(heap, batch);
}

void LaunchGather(const DeviceHeap& heap, const DeviceBatch& batch, cudaStream_t stream) {
  GatherKernel<<<NumBlocks(heap), kThreads, 0, stream>>>(heap, batch);
}

cudaError_t LoadPagesKernels() {
  const cudaError_t error = LoadKernel(reinterpret_cast<const void*>(PublishKernel));
  return error != cudaSuccess ? error : LoadKernel(reinterpret_cast<const void*>(GatherKernel));
}

}  // namespace symmkv
