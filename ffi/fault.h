// What can be wrong with a call, as numbers: a kernel can record these, and both transports word
// them alike.
#pragma once

#include <cstdint>
#include <string>

#include "ffi/layout.h"

namespace symmkv {

enum class FaultCode : uint32_t {
  kNone = 0,
  kTimeout,
  kDied,
  kClosed,
  kDisagree,   // value, bound: the two folded fingerprints
  kBadCount,   // value: num_current; bound: what the plan's arrays or the heap hold
  kBadPage,    // slot, value: the dense page; bound: num_dense_pages
  kBadWriter,  // slot, value: the writer; bound: cp_size
  kPublishedTwice,
  kNotMet,        // gather without a barrier since publish
  kNotPublished,  // gather without a publish
  kOtherPlan,     // gather with another plan than publish's
  kWrongIndex,    // value: the device's index along the program's axis
};

struct Fault {
  FaultCode code;
  Phase phase;
  uint32_t rank;  // the rank it is about
  int32_t slot;
  int64_t value;
  int64_t bound;
  uint64_t epoch;
  uint64_t missing;  // bit r: rank r had not arrived
};

constexpr Fault MakeFault(FaultCode code, Phase phase, uint32_t rank, uint64_t epoch) {
  return Fault{code, phase, rank, 0, 0, 0, epoch, 0};
}

// What it says, without phase and exchange; empty for kTimeout, kDied and kClosed, which CauseText
// words from their numbers.
std::string FaultText(const Fault& fault);

// The record of a fault that `rank` found; `timeout_ms` is the heap's.
Cause MakeCause(const Fault& fault, uint64_t timeout_ms);

}  // namespace symmkv
