// The batch as a kernel reads it: checked, so that no plan can lead out of bounds.
#pragma once

#include "ffi/cuda/wait.cuh"

namespace symmkv {

// Where a call stands, the same for every thread of a block.
struct Turn {
  uint32_t status;      // as the block found it
  int32_t num_current;  // 0 if it is out of bounds
  uint32_t fingerprint;
  uint32_t published_fingerprint;
  uint64_t epoch;
  uint64_t published_epoch;
};

// By one thread. The loads are independent of each other: one latency for all.
__device__ inline Turn ReadTurn(const DeviceHeap& heap, const DeviceBatch& batch) {
  const HeapState state = LoadState(heap);
  const int32_t num_current = *batch.num_current;
  const uint32_t fingerprint = *batch.fingerprint;
  return Turn{state.status, num_current,          fingerprint, state.published_fingerprint,
              state.epoch,  state.published_epoch};
}

// By one thread: a count that the plan's arrays or the heap can't hold poisons the heap.
__device__ inline void CheckCount(const DeviceHeap& heap, const DeviceBatch& batch, Phase phase,
                                  Turn* turn) {
  const int64_t slots = static_cast<int64_t>(heap.layout.geometry.num_slots);
  const int64_t most = batch.capacity < slots ? batch.capacity : slots;
  if (turn->num_current >= 0 && turn->num_current <= most) return;
  Fault fault = MakeFault(FaultCode::kBadCount, phase, heap.rank, turn->epoch + 1);
  fault.value = turn->num_current;
  fault.bound = most;
  if (turn->status == kOpen) Fail(heap, fault);
  turn->num_current = 0;
  turn->status = kPoisoned;
}

struct Slot {
  int32_t page;
  int32_t writer;  // -1: out of bounds, to be left alone
};

// A slot as the plan has it, for CheckSlot: its load may be in flight while others are.
__device__ inline Slot LoadSlot(const DeviceBatch& batch, int64_t index) {
  return index < batch.capacity ? Slot{batch.page[index], batch.writer[index]} : Slot{0, -1};
}

// A slot whose page and writer are in bounds; one that isn't poisons the heap.
__device__ inline Slot CheckSlot(const DeviceHeap& heap, const DeviceBatch& batch, Phase phase,
                                 uint64_t epoch, int32_t index, const Slot& slot) {
  const bool page_fits = slot.page >= 0 && slot.page < batch.num_dense_pages;
  const int32_t cp_size = static_cast<int32_t>(heap.layout.geometry.cp_size);
  const bool writer_fits = slot.writer >= 0 && slot.writer < cp_size;
  if (page_fits && writer_fits) return slot;
  Fault fault = MakeFault(page_fits ? FaultCode::kBadWriter : FaultCode::kBadPage, phase, heap.rank,
                          epoch + 1);
  fault.slot = index;
  fault.value = page_fits ? slot.writer : slot.page;
  fault.bound = page_fits ? cp_size : batch.num_dense_pages;
  Fail(heap, fault);
  return Slot{0, -1};
}

__device__ inline Slot ReadSlot(const DeviceHeap& heap, const DeviceBatch& batch, Phase phase,
                                uint64_t epoch, int32_t index) {
  return CheckSlot(heap, batch, phase, epoch, index, LoadSlot(batch, index));
}

__device__ inline char* DensePage(const DeviceHeap& heap, const DeviceBatch& batch, uint32_t buffer,
                                  int32_t page) {
  return batch.dense[buffer] +
         static_cast<uint64_t>(page) * heap.layout.geometry.page_nbytes[buffer];
}

}  // namespace symmkv
