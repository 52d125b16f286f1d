// Stubs for HCCL: the ranks of a machine exchange data in shared memory.
//
// A group has a file in /dev/shm with a counter of arrivals and a buffer for
// each rank. Each operation copies the caller's data into its buffer, waits for
// all ranks, reads, and waits again.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

namespace {

constexpr int kOk = 0, kFailed = 4;
constexpr size_t kBuffer = size_t{64} << 20; // sparse
constexpr uint32_t kMaxRanks = 8;
constexpr size_t kPage = 4096;
constexpr size_t kRootInfo = 4108; // HCCL_ROOT_INFO_BYTES

struct Group {
  char name[64];
  uint32_t rank, size;
  std::atomic<uint32_t> *arrivals;
  char *buffers;

  char *buffer(uint32_t of) const { return buffers + of * kBuffer; }

  // Waits until each rank has called it as often as this one.
  void wait() {
    const uint32_t round = arrivals->fetch_add(1) / size + 1;
    while (arrivals->load() < round * size)
      usleep(500);
  }
};

size_t bytes_of(int type) {
  // int8, int16, int32, float16, float32, int64, uint64, uint8, uint16, uint32,
  // float64, bfloat16
  static const size_t sizes[] = {1, 2, 4, 2, 4, 8, 8, 1, 2, 4, 8, 2};
  return sizes[type];
}

float from_half(uint16_t bits, bool is_bfloat16) {
  if (!is_bfloat16) {
    _Float16 value;
    memcpy(&value, &bits, sizeof(value));
    return static_cast<float>(value);
  }
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  memcpy(&value, &wide, sizeof(value));
  return value;
}

uint16_t to_half(float value, bool is_bfloat16) {
  uint16_t bits;
  if (!is_bfloat16) {
    const _Float16 half = static_cast<_Float16>(value);
    memcpy(&bits, &half, sizeof(bits));
    return bits;
  }
  uint32_t wide;
  memcpy(&wide, &value, sizeof(wide));
  return static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

template <typename T> void add(void *target, const void *source, size_t count) {
  for (size_t index = 0; index < count; ++index)
    static_cast<T *>(target)[index] += static_cast<const T *>(source)[index];
}

// Adds elements of a type of HCCL. Return false if the type is not supported.
bool add_elements(void *target, const void *source, size_t count, int type) {
  constexpr int kInt32 = 2, kFloat16 = 3, kFloat32 = 4, kBfloat16 = 11;
  if (type == kInt32) {
    add<int32_t>(target, source, count);
  } else if (type == kFloat32) {
    add<float>(target, source, count);
  } else if (type == kFloat16 || type == kBfloat16) {
    auto *sums = static_cast<uint16_t *>(target);
    const auto *added = static_cast<const uint16_t *>(source);
    const bool is_bfloat16 = type == kBfloat16;
    for (size_t index = 0; index < count; ++index)
      sums[index] = to_half(from_half(sums[index], is_bfloat16) +
                                from_half(added[index], is_bfloat16),
                            is_bfloat16);
  } else {
    return false;
  }
  return true;
}

} // namespace

extern "C" {

int HcclGetRootInfo(char *info) {
  static std::atomic<int> groups{0};
  memset(info, 0, kRootInfo);
  snprintf(info, kRootInfo, "/fake_hccl_%d_%d", static_cast<int>(getpid()),
           groups++);
  return kOk;
}
int HcclCommInitRootInfo(uint32_t size, const char *info, uint32_t rank,
                         void **result) {
  if (size > kMaxRanks || rank >= size)
    return kFailed;
  const int file = shm_open(info, O_CREAT | O_RDWR, 0600);
  const size_t bytes = kPage + kMaxRanks * kBuffer;
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0)
    return kFailed;
  void *memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED)
    return kFailed;
  auto *group = new Group;
  snprintf(group->name, sizeof(group->name), "%s", info);
  group->rank = rank;
  group->size = size;
  group->arrivals = static_cast<std::atomic<uint32_t> *>(memory);
  group->buffers = static_cast<char *>(memory) + kPage;
  group->wait();
  if (rank == 0)
    shm_unlink(info); // no rank opens it again
  *result = group;
  return kOk;
}
int HcclCommInitRootInfoConfig(uint32_t size, const char *info, uint32_t rank,
                               const void *, void **result) {
  return HcclCommInitRootInfo(size, info, rank, result);
}
int HcclGetCommName(void *group, char *name) {
  strcpy(name, static_cast<Group *>(group)->name);
  return kOk;
}
int HcclGetRankSize(void *group, uint32_t *size) {
  *size = group == nullptr ? 1 : static_cast<Group *>(group)->size;
  return kOk;
}
int HcclGetRankId(void *group, uint32_t *rank) {
  *rank = group == nullptr ? 0 : static_cast<Group *>(group)->rank;
  return kOk;
}
const char *HcclGetErrorString(int) { return "no error"; }

int HcclAllGather(const void *source, void *target, uint64_t count, int type,
                  void *handle, void *) {
  auto *group = static_cast<Group *>(handle);
  const size_t bytes = count * bytes_of(type);
  if (bytes > kBuffer)
    return kFailed;
  memcpy(group->buffer(group->rank), source, bytes);
  group->wait();
  for (uint32_t rank = 0; rank < group->size; ++rank)
    memcpy(static_cast<char *>(target) + rank * bytes, group->buffer(rank),
           bytes);
  group->wait();
  return kOk;
}
int HcclAllReduce(const void *source, void *target, uint64_t count, int type,
                  int operation, void *handle, void *) {
  constexpr int kSum = 0;
  auto *group = static_cast<Group *>(handle);
  const size_t bytes = count * bytes_of(type);
  if (bytes > kBuffer || operation != kSum)
    return kFailed;
  memcpy(group->buffer(group->rank), source, bytes);
  group->wait();
  memcpy(target, group->buffer(0), bytes);
  for (uint32_t rank = 1; rank < group->size; ++rank)
    if (!add_elements(target, group->buffer(rank), count, type))
      return kFailed;
  group->wait();
  return kOk;
}
int HcclBroadcast(void *data, uint64_t count, int type, uint32_t root,
                  void *handle, void *) {
  auto *group = static_cast<Group *>(handle);
  const size_t bytes = count * bytes_of(type);
  if (bytes > kBuffer)
    return kFailed;
  if (group->rank == root)
    memcpy(group->buffer(root), data, bytes);
  group->wait();
  memcpy(data, group->buffer(root), bytes);
  group->wait();
  return kOk;
}
int HcclBarrier(void *group, void *) {
  static_cast<Group *>(group)->wait();
  return kOk;
}

} // extern "C"
