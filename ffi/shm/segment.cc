#include "ffi/shm/segment.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace symmkv {
namespace {

constexpr char kPrefix[] = "/symmkv-";
constexpr char kDirectory[] = "/dev/shm";

std::runtime_error SystemError(const std::string& what, int error) {
  return std::runtime_error(what + ": " + std::strerror(error));
}

struct flock WholeFile(short type) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  return lock;
}

// Nobody else holds the lock on this open file description's file.
bool LockIsFree(int fd) {
  struct flock lock = WholeFile(F_WRLCK);
  return fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

// Takes the lock if nobody else holds it.
bool TryLock(int fd) {
  struct flock lock = WholeFile(F_WRLCK);
  return fcntl(fd, F_OFD_SETLK, &lock) == 0;
}

// Takes the lock; a sweep may hold it for a moment.
bool Lock(int fd) {
  struct flock lock = WholeFile(F_WRLCK);
  while (fcntl(fd, F_OFD_SETLKW, &lock) != 0) {
    if (errno != EINTR) return false;
  }
  return true;
}

// posix_fallocate with signals held back: the kernel gives up, and undoes, a reservation that one
// interrupts, and a large one never ends under a profiler's timer.
int Reserve(int fd, size_t nbytes) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int error = posix_fallocate(fd, 0, static_cast<off_t>(nbytes));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return error;
}

std::string RandomName() {
  uint64_t bits[2];
  if (getrandom(bits, sizeof bits, 0) != sizeof bits) throw SystemError("getrandom", errno);
  char name[64];
  std::snprintf(name, sizeof name, "%s%016llx%016llx", kPrefix,
                static_cast<unsigned long long>(bits[0]), static_cast<unsigned long long>(bits[1]));
  return name;
}

}  // namespace

Segment& Segment::operator=(Segment&& other) noexcept {
  if (this != &other) {
    Release();
    fd_ = std::exchange(other.fd_, -1);
    base_ = std::exchange(other.base_, nullptr);
    nbytes_ = std::exchange(other.nbytes_, 0);
    name_ = std::exchange(other.name_, {});
  }
  return *this;
}

Segment Segment::Create(size_t nbytes) {
  Segment segment;
  for (;;) {
    const std::string name = RandomName();
    segment.fd_ = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
    if (segment.fd_ < 0) throw SystemError("cannot create shared memory " + name, errno);
    segment.name_ = name;
    if (!Lock(segment.fd_)) throw SystemError("cannot lock " + name, errno);
    // A sweep may have seen the name before the lock; then it is gone, and so is this segment.
    struct stat status{};
    if (fstat(segment.fd_, &status) == 0 && status.st_nlink == 1) break;
    segment.Release();
  }
  // Reserve now: a page that can't be had later would be a SIGBUS inside a copy.
  const int error = Reserve(segment.fd_, nbytes);
  if (error != 0) {
    throw SystemError("cannot reserve " + std::to_string(nbytes) + " bytes of shared memory in " +
                          kDirectory +
                          " (enlarge it, or lower max_current_pages or SYMMKV_HEAP_MB)",
                      error);
  }
  segment.Map(nbytes);
  return segment;
}

Segment Segment::Open(const std::string& name, size_t nbytes) {
  Segment segment;
  segment.fd_ = shm_open(name.c_str(), O_RDWR, 0);
  if (segment.fd_ < 0) throw SystemError("cannot open shared memory " + name, errno);
  struct stat status{};
  if (fstat(segment.fd_, &status) != 0) throw SystemError("cannot stat " + name, errno);
  if (static_cast<size_t>(status.st_size) != nbytes) {
    throw std::runtime_error("shared memory " + name + " has " + std::to_string(status.st_size) +
                             " bytes, expected " + std::to_string(nbytes));
  }
  segment.Map(nbytes);
  return segment;
}

void Segment::Map(size_t nbytes) {
  // Populated, so that the first exchange pays no page faults.
  void* base = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, 0);
  if (base == MAP_FAILED) throw SystemError("cannot map shared memory", errno);
  base_ = static_cast<char*>(base);
  nbytes_ = nbytes;
}

void Segment::Unlink() {
  if (name_.empty()) return;
  shm_unlink(name_.c_str());
  name_.clear();
}

bool Segment::OwnerAlive() const { return !LockIsFree(fd_); }

void Segment::Release() {
  Unlink();
  if (base_ != nullptr) munmap(std::exchange(base_, nullptr), nbytes_);
  if (fd_ >= 0) close(std::exchange(fd_, -1));
}

void Segment::Abandon() {
  name_.clear();
  Release();
}

int Segment::SweepStale() {
  DIR* directory = opendir(kDirectory);
  if (directory == nullptr) return 0;
  int removed = 0;
  while (const dirent* entry = readdir(directory)) {
    const std::string name = std::string("/") + entry->d_name;
    if (name.compare(0, sizeof kPrefix - 1, kPrefix) != 0) continue;
    const int fd = shm_open(name.c_str(), O_RDWR, 0);
    if (fd < 0) continue;  // another user's, or just unlinked
    // Under the lock: an owner that is about to take it looks at the name only after.
    if (TryLock(fd) && shm_unlink(name.c_str()) == 0) ++removed;
    close(fd);
  }
  closedir(directory);
  return removed;
}

}  // namespace symmkv
