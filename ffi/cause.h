// Causes in words: one wording for CPU and CUDA.
#pragma once

#include <string>

#include "ffi/layout.h"

namespace symmkv {

// "publish", "barrier", "gather", "exchange"; "idle" between calls.
const char* PhaseName(Phase phase);

// "barrier of exchange 1234: rank 3 did not arrive within 300 s (ranks 0,1,2 did)", and what to do.
std::string CauseText(const Cause& cause, uint32_t cp_size);

// A cause of code kFailed or kDisagree with `detail`, cut to the record's room.
Cause MakeCause(CauseCode code, Phase phase, uint32_t rank, uint64_t epoch,
                const std::string& detail);

}  // namespace symmkv
