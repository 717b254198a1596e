#include "ffi/fault.h"

#include <cstdio>

#include "ffi/cause.h"

namespace symmkv {
namespace {

std::string Disagreement(const Fault& fault) {
  char text[sizeof Cause::detail];
  std::snprintf(
      text, sizeof text,
      "its batch differs from another rank's (plan fingerprints %04llx and %04llx, 0 for a "
      "barrier without a plan); make the same calls with the same plan on every rank",
      static_cast<unsigned long long>(fault.value), static_cast<unsigned long long>(fault.bound));
  return text;
}

CauseCode CodeOf(FaultCode code) {
  switch (code) {
    case FaultCode::kTimeout:
      return CauseCode::kTimeout;
    case FaultCode::kDied:
      return CauseCode::kDied;
    case FaultCode::kClosed:
      return CauseCode::kClosed;
    case FaultCode::kDisagree:
      return CauseCode::kDisagree;
    default:
      return CauseCode::kFailed;
  }
}

}  // namespace

std::string FaultText(const Fault& fault) {
  const std::string value = std::to_string(fault.value), bound = std::to_string(fault.bound);
  const std::string slot = "slot " + std::to_string(fault.slot);
  switch (fault.code) {
    case FaultCode::kDisagree:
      return Disagreement(fault);
    case FaultCode::kBadCount:
      return "the plan has " + value + " current pages, its arrays and the heap hold " + bound;
    case FaultCode::kBadPage:
      return slot + " has dense page " + value + ", must be below " + bound;
    case FaultCode::kBadWriter:
      return slot + " has writer " + value + ", must be below " + bound;
    case FaultCode::kPublishedTwice:
      return "published already in this exchange; call barrier before the next publish";
    case FaultCode::kNotMet:
      return "no barrier since publish; call barrier between publish and gather";
    case FaultCode::kNotPublished:
      return "no publish in this exchange; call publish, barrier, gather in this order";
    case FaultCode::kOtherPlan:
      return "another plan than publish's; pass both the same plan";
    case FaultCode::kWrongIndex:
      return "this device has index " + value +
             " in the program's mesh; use the mesh that the heap was created with";
    default:
      return "";
  }
}

Cause MakeCause(const Fault& fault, uint64_t timeout_ms) {
  Cause cause =
      MakeCause(CodeOf(fault.code), fault.phase, fault.rank, fault.epoch, FaultText(fault));
  cause.missing = fault.missing;
  if (fault.code == FaultCode::kTimeout) cause.timeout_ms = timeout_ms;
  return cause;
}

}  // namespace symmkv
