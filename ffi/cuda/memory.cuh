// Memory operations of the kernels, in PTX where C++ has no word for the scope.
#pragma once

#include <cstdint>

#include "ffi/cuda/device_heap.h"

namespace symmkv {

// Acquire at system scope: what another GPU stored before its release is visible after it.
__device__ inline uint64_t LoadAcquire(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

// Release at system scope: after every earlier store of this thread and of those it synchronised
// with.
__device__ inline void StoreRelease(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// One 16-byte transaction of which at least each 8-byte half is stored as a whole.
__device__ inline void StorePacket(Packet* to, const Packet& packet) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(packet.data0),
               "r"(packet.flag0), "r"(packet.data1), "r"(packet.flag1)
               : "memory");
}

__device__ inline Packet LoadPacket(const Packet* from) {
  Packet packet;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(packet.data0), "=r"(packet.flag0), "=r"(packet.data1), "=r"(packet.flag1)
               : "l"(from)
               : "memory");
  return packet;
}

__device__ inline uint64_t NowNs() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

// Loads that a thread has in flight before it stores the first: what hides the memory's latency.
constexpr int kLoadsInFlight = 4;

// Copies `nbytes`, a multiple of 16, from `from` to to(granule index, value), by threads `thread`
// of `num_threads`. Loads bypass the L1 cache (.cg), which isn't coherent with the other GPUs'
// stores.
template <class Store>
__device__ inline void CopyGranules(const char* from, uint64_t nbytes, uint32_t thread,
                                    uint32_t num_threads, Store to) {
  const uint4* const granules = reinterpret_cast<const uint4*>(from);
  const uint32_t count = static_cast<uint32_t>(nbytes / sizeof(uint4));
  for (uint32_t first = thread; first < count; first += kLoadsInFlight * num_threads) {
    uint4 loaded[kLoadsInFlight];
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      const uint32_t granule = first + i * num_threads;
      if (granule < count) loaded[i] = __ldcg(granules + granule);
    }
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      const uint32_t granule = first + i * num_threads;
      if (granule < count) to(granule, loaded[i]);
    }
  }
}

// Bytes that no reader takes for data: NaN in every float format.
__device__ inline void FillLost(char* to, uint64_t nbytes, uint32_t thread, uint32_t num_threads) {
  const uint4 lost = make_uint4(~0u, ~0u, ~0u, ~0u);
  for (uint64_t i = thread; i < nbytes / sizeof(uint4); i += num_threads)
    reinterpret_cast<uint4*>(to)[i] = lost;
}

}  // namespace symmkv
