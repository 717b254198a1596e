// A slab in POSIX shared memory: creation, mapping, and proof of life.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "ffi/layout.h"

namespace symmkv {

// Owns a file descriptor and a mapping of one rank's slab.
//
// Life: the owner holds an open-file-description lock on its segment until it lets go or dies,
// however it dies; the kernel releases it. A peer asks for the lock without taking it. Unlike a pid
// this works across pid namespaces, can't be reused by another process, and needs no thread or
// socket.
//
// Names: a segment has one only until every rank has mapped it. Should its owner be killed in that
// window, the next SweepStale of the same user finds the name without a lock and removes it.
class Segment {
 public:
  Segment() = default;
  Segment(Segment&& other) noexcept { *this = static_cast<Segment&&>(other); }
  Segment& operator=(Segment&& other) noexcept;
  ~Segment() { Release(); }

  // Creates, reserves, locks and zeroes a slab. Throws std::runtime_error; nothing is left behind
  // then.
  static Segment Create(size_t nbytes);
  // Maps a peer's slab of the same size. Throws std::runtime_error.
  static Segment Open(const std::string& name, size_t nbytes);
  // Removes the names of segments whose owners are gone; returns how many.
  static int SweepStale();

  // Removes the name; the mappings stay. Idempotent.
  void Unlink();
  // True while the owner, another process or context, lives and has not released.
  bool OwnerAlive() const;
  void Release();
  // In a forked child: lets go of what is the parent's. A child's descriptor would keep the lock,
  // and so hide the parent's death.
  void Abandon();

  const std::string& name() const { return name_; }
  SlabHeader* header() const { return reinterpret_cast<SlabHeader*>(base_); }
  Mailbox* mailbox(uint32_t source) const {
    return reinterpret_cast<Mailbox*>(base_ + kMailboxesOffset) + source;
  }
  char* at(uint64_t offset) const { return base_ + offset; }

 private:
  void Map(size_t nbytes);

  int fd_ = -1;
  char* base_ = nullptr;
  size_t nbytes_ = 0;
  std::string name_;
};

}  // namespace symmkv
