// A copy whose stores go past the caches, straight to memory. copy_choice.h says when.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace symmkv {

// Below this there is nothing to gain, and streaming stores want whole lines.
constexpr uint64_t kMinStreamNbytes = 4096;

// The stores are weakly ordered, also against a release: StreamFence comes before it.
inline void StreamCopy(char* to, const char* from, uint64_t nbytes) {
#if defined(__SSE2__)
  constexpr uint64_t kVectors = 4;
  constexpr uint64_t kBlockNbytes = kVectors * sizeof(__m128i);
  if (nbytes >= kMinStreamNbytes && reinterpret_cast<uintptr_t>(to) % sizeof(__m128i) == 0) {
    const auto* source = reinterpret_cast<const __m128i*>(from);
    auto* target = reinterpret_cast<__m128i*>(to);
    for (uint64_t block = 0; block < nbytes / kBlockNbytes; ++block) {
      __m128i vectors[kVectors];
      for (uint64_t v = 0; v < kVectors; ++v) vectors[v] = _mm_loadu_si128(source++);
      for (uint64_t v = 0; v < kVectors; ++v) _mm_stream_si128(target++, vectors[v]);
    }
    std::memcpy(target, source, nbytes % kBlockNbytes);
    return;
  }
#endif
  std::memcpy(to, from, nbytes);
}

// Orders this thread's streaming stores before its later stores.
inline void StreamFence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace symmkv
