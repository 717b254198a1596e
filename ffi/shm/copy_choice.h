// Whether the copies of an exchange stream past the caches, chosen by the clock.
//
// An ordinary store into a staging line that the peer has read takes the line back from the peer's
// cache: 17 ns a line between cores that share no cache, however far ahead one prefetches. A
// streaming store takes 3 ns, and leaves the peer to read from memory. With 2 ranks on an AMD EPYC,
// publish and gather of 1 MB take 170 µs if they stream and 460 if they don't where the cores share
// no cache, but 180 and 80 where they do. Nothing else tells the two apart: threads move between
// cores, and virtual cores between real ones. So now and then a few exchanges try both.
//
// The trials go by the exchange's number, so all ranks try the same at the same time: what a rank
// measures, its publish and its gather of the peers' pages, is then of one kind. What each
// concludes is its own affair, since the bytes are the same.
#pragma once

#include <cstdint>
#include <limits>

namespace symmkv {

class CopyChoice {
 public:
  // Bytes that a rank moves in an exchange, published and gathered. From kMaxTriedNbytes on they
  // leave nothing in the caches, so every copy streams. Below kMinTriedNbytes a trial says little.
  static constexpr uint64_t kMinTriedNbytes = 64 << 10;
  static constexpr uint64_t kMaxTriedNbytes = 16 << 20;

  bool PublishStreams(uint64_t exchange, uint64_t moved_nbytes) {
    if (moved_nbytes >= kMaxTriedNbytes) return true;
    if (InTrial(exchange)) return TrialStreams(exchange);
    if (least_[0] < kUnknown && least_[1] < kUnknown) {
      streams_ = least_[1] < least_[0];
      least_[0] = least_[1] = kUnknown;
    }
    return streams_;
  }
  static bool GatherStreams(uint64_t moved_nbytes) { return moved_nbytes >= kMaxTriedNbytes; }

  // What the copies of an exchange took, without the wait between them.
  void Published(uint64_t ns) { publish_ns_ = ns; }
  void Gathered(uint64_t exchange, uint64_t moved_nbytes, uint64_t ns) {
    // The first half of a trial finds the lines where the copies before it have left them.
    if (!InTrial(exchange) || exchange % kTrialExchanges < kTrialExchanges / 2) return;
    if (moved_nbytes < kMinTriedNbytes || moved_nbytes >= kMaxTriedNbytes) return;
    const double took = static_cast<double>(publish_ns_ + ns) / static_cast<double>(moved_nbytes);
    double& least = least_[TrialStreams(exchange)];
    if (took < least) least = took;
  }

 private:
  // A round of two trials, without streaming and with it, at the start of each period.
  static constexpr uint64_t kTrialExchanges = 4;
  static constexpr uint64_t kPeriodExchanges = 256;
  static constexpr double kUnknown = std::numeric_limits<double>::infinity();

  static bool InTrial(uint64_t exchange) {
    return exchange % kPeriodExchanges < 2 * kTrialExchanges;
  }
  static bool TrialStreams(uint64_t exchange) {
    return exchange % kPeriodExchanges >= kTrialExchanges;
  }

  bool streams_ = false;
  uint64_t publish_ns_ = 0;
  double least_[2] = {kUnknown, kUnknown};  // ns a byte in this round: without streaming, with it
};

}  // namespace symmkv
