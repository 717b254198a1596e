#include "ffi/cause.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace symmkv {
namespace {

// "rank 3", "ranks 0,2", or "" for none.
std::string Ranks(uint64_t mask, uint32_t cp_size) {
  std::string list;
  int count = 0;
  for (uint32_t r = 0; r < cp_size; ++r) {
    if ((mask >> r & 1) == 0) continue;
    list += (count++ ? "," : "") + std::to_string(r);
  }
  if (count == 0) return "";
  return (count == 1 ? "rank " : "ranks ") + list;
}

std::string Seconds(uint64_t timeout_ms) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", static_cast<double>(timeout_ms) / 1000);
  return text;
}

}  // namespace

const char* PhaseName(Phase phase) {
  switch (phase) {
    case Phase::kPublish:
      return "publish";
    case Phase::kBarrier:
      return "barrier";
    case Phase::kGather:
      return "gather";
    case Phase::kExchange:
      return "exchange";
    case Phase::kTicket:
      return "new_ticket";
    case Phase::kIdle:
      return "idle";
  }
  return "unknown phase";
}

std::string CauseText(const Cause& cause, uint32_t cp_size) {
  const uint64_t all = cp_size >= 64 ? ~uint64_t{0} : (uint64_t{1} << cp_size) - 1;
  const std::string missing = Ranks(cause.missing, cp_size);
  const std::string arrived = Ranks(all & ~cause.missing, cp_size);
  const std::string others = arrived.empty() ? "" : " (" + arrived + " did)";

  std::string text = PhaseName(cause.phase);
  text += (cause.phase == Phase::kExchange ? " " : " of exchange ") + std::to_string(cause.epoch);
  text += ": ";
  switch (cause.code) {
    case CauseCode::kTimeout:
      text += missing + " did not arrive within " + Seconds(cause.timeout_ms) + others;
      break;
    case CauseCode::kDied:
      text += missing + " did not arrive" + others + "; rank " + std::to_string(cause.rank) +
              " has died";
      break;
    case CauseCode::kClosed:
      text += missing + " did not arrive" + others + "; rank " + std::to_string(cause.rank) +
              " has closed its heap or ended";
      break;
    case CauseCode::kDisagree:
    case CauseCode::kFailed:
      text += "rank " + std::to_string(cause.rank) + ": " + cause.detail;
      break;
    case CauseCode::kNone:
      text += "no failure";
      break;
  }
  return text + ". The heap is poisoned; close it and create a new one once every rank is there";
}

Cause MakeCause(CauseCode code, Phase phase, uint32_t rank, uint64_t epoch,
                const std::string& detail) {
  Cause cause{};
  cause.code = code;
  cause.phase = phase;
  cause.rank = rank;
  cause.epoch = epoch;
  std::memcpy(cause.detail, detail.data(), std::min(detail.size(), sizeof cause.detail - 1));
  return cause;
}

}  // namespace symmkv
