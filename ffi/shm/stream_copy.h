// Copies whose stores go past the caches, straight to memory.
//
// For staging: an ordinary store into a line that the peer has read first takes it back from the
// peer's cache, at 17 ns a line between cores that share no cache, however far ahead one
// prefetches. A streaming store takes 3, and the peer reads the page from memory no slower than
// from here. It is a bargain of means: publish and gather of 64 kB to 1 MB take 2.5 times as long
// without it between such cores, and half as long at 1 MB where the cores share one (measured with
// 2 cores of an AMD EPYC, which are now the one and now the other).
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
