// Stubs for CANN's runtime. Memory of the device is memory of the host, copies
// are done, kernels compute nothing.
//
// MindSpore's Ascend plugin checks shapes, selects kernels and plans their
// tiling on the host. With these stubs all of that runs on a machine without a
// device. `cann_stubs.py` makes a function that returns 0 for every other
// symbol.
//
// FAKE_SOC names the chip, FAKE_HBM_GB gives its memory, and FAKE_TRACE the
// file to which operators are written that CANN would run. `fake_counts`
// returns the copies and synchronisations so far.

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>

namespace {

constexpr int kOk = 0;
constexpr int kOutOfMemory = 207001;
constexpr uint32_t kCubeCores = 24;
constexpr uint32_t kVectorCores = 48;
constexpr int kCubeCoreResource = 0;
constexpr size_t kGigabyte = size_t{1} << 30;
// What CANN itself occupies on a device before any process allocates.
constexpr size_t kReserved = 3 * kGigabyte;

// Above the numbers that operators take as arguments, which the trace would
// otherwise describe as tensors.
std::atomic<uint64_t> next_handle{uint64_t{1} << 44};
std::mutex mutex;
std::map<void *, size_t> allocations; // guarded by mutex
std::atomic<size_t> used{0};

void *handle() { return reinterpret_cast<void *>(next_handle++); }

size_t device_bytes() {
  const char *gigabytes = getenv("FAKE_HBM_GB");
  return (gigabytes != nullptr ? strtoull(gigabytes, nullptr, 10) : 64) *
         kGigabyte;
}

// Reserves addresses; the system hands out pages as they are touched.
void *reserve(size_t size) {
  void *address = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return address == MAP_FAILED ? nullptr : address;
}

int allocate(void **result, size_t size) {
  size = size == 0 ? 64 : size;
  *result = reserve(size);
  if (*result == nullptr)
    return kOutOfMemory;
  std::lock_guard<std::mutex> lock(mutex);
  allocations[*result] = size;
  used += size;
  return kOk;
}

int release(void *address) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = allocations.find(address);
  if (found == allocations.end())
    return kOk;
  munmap(address, found->second);
  used -= found->second;
  allocations.erase(found);
  return kOk;
}

// Pinned memory of the host, by its first address; guarded by mutex.
std::map<const char *, size_t> pinned;

bool is_pinned(const void *address) {
  const auto *wanted = static_cast<const char *>(address);
  std::lock_guard<std::mutex> lock(mutex);
  const auto after = pinned.upper_bound(wanted);
  if (after == pinned.begin())
    return false;
  const auto &[first, size] = *std::prev(after);
  return wanted < first + size;
}

enum Count {
  kToDevice,
  kPinnedToDevice,
  kBytesToDevice,
  kToHost,
  kPinnedToHost,
  kBytesToHost,
  kOnDevice,
  kSynchronisations,
  kNumCounts
};
std::atomic<uint64_t> counts[kNumCounts];

constexpr int kHostToDevice = 1, kDeviceToHost = 2;

void count_copy(const void *target, const void *source, size_t size, int kind) {
  if (kind == kHostToDevice) {
    ++counts[kToDevice];
    counts[kPinnedToDevice] += is_pinned(source);
    counts[kBytesToDevice] += size;
  } else if (kind == kDeviceToHost) {
    ++counts[kToHost];
    counts[kPinnedToHost] += is_pinned(target);
    counts[kBytesToHost] += size;
  } else {
    ++counts[kOnDevice];
  }
}

// Descriptions of the arguments of operators by handle; guarded by mutex. Empty
// without FAKE_TRACE.
std::unordered_map<const void *, std::string> descriptions;

FILE *trace_file() {
  static FILE *file = getenv("FAKE_TRACE") != nullptr
                          ? fopen(getenv("FAKE_TRACE"), "a")
                          : nullptr;
  return file;
}

void *described(const std::string &text) {
  void *result = handle();
  if (trace_file() == nullptr)
    return result;
  std::lock_guard<std::mutex> lock(mutex);
  descriptions[result] = text;
  return result;
}

int forget(const void *object) {
  std::lock_guard<std::mutex> lock(mutex);
  descriptions.erase(object);
  return kOk;
}

void trace(const std::string &line) {
  FILE *file = trace_file();
  if (file == nullptr)
    return;
  fprintf(file, "%s\n", line.c_str());
  fflush(file);
}

template <typename T> std::string joined(const T *values, uint64_t number) {
  std::string text;
  for (uint64_t index = 0; index < number; ++index)
    text += (index > 0 ? "," : "") + std::to_string(values[index]);
  return text;
}

// Writes which rows of the mask each request of PagedAttention reads, if the
// copied words are its plan: the type of the mask, its columns, and of each
// request its number, rows and first element in the mask. The layout is that of
// ATB's paged_attention_tiling_dependency.h.
void trace_mask(const void *source, size_t size) {
  constexpr size_t kHead = 44, kRequest = 17;
  constexpr size_t kBatch = 0, kColumns = 13, kHeadSize = 17, kRequestSize = 18,
                   kMaskType = 37;
  constexpr size_t kRows = 0, kNumber = 8, kHigh = 10, kLow = 14;
  if (trace_file() == nullptr || size < (kHead + kRequest) * sizeof(uint32_t))
    return;
  const auto *words = static_cast<const uint32_t *>(source);
  const size_t requests = words[kBatch];
  if (words[kHeadSize] != kHead || words[kRequestSize] != kRequest ||
      size / sizeof(uint32_t) < kHead + requests * kRequest)
    return;
  std::string line = "mask " + std::to_string(words[kMaskType]) + " " +
                     std::to_string(words[kColumns]);
  for (size_t index = 0; index < requests; ++index) {
    const uint32_t *request = words + kHead + index * kRequest;
    const uint64_t first = (uint64_t{request[kHigh]} << 32) | request[kLow];
    line += " " + std::to_string(request[kNumber]) + ":" +
            std::to_string(request[kRows]) + ":" + std::to_string(first);
  }
  trace(line);
}

// Writes the arguments of FlashAttentionScore, if the copied words are ATB's
// plan of it: of each request its queries, keys, and the first element of both.
// The layout is that of ATB's flash_attention_tiling_dependency.cpp.
void trace_flash(const void *source, size_t size) {
  constexpr size_t kHead = 37, kRequest = 27;
  constexpr size_t kBatch = 0, kColumns = 1, kHeads = 2, kWidth = 3,
                   kKvHeads = 4, kTriangle = 8, kHeadSize = 14,
                   kRequestSize = 15, kKey = 16, kRows = 18, kMaskType = 20,
                   kValueWidth = 23;
  constexpr size_t kQueries = 0, kKeys = 1, kFirstQuery = 4, kFirstKey = 6;
  if (trace_file() == nullptr || size < (kHead + kRequest) * sizeof(uint32_t))
    return;
  const auto *words = static_cast<const uint32_t *>(source);
  const size_t requests = words[kBatch];
  if (words[kHeadSize] != kHead || words[kRequestSize] != kRequest ||
      size / sizeof(uint32_t) < kHead + requests * kRequest)
    return;
  std::string line = "atbFlashAttention";
  for (const size_t each : {kKey, kHeads, kKvHeads, kWidth, kValueWidth,
                            kMaskType, kColumns, kTriangle, kRows})
    line += " " + std::to_string(words[each]);
  line += " requests(";
  for (size_t index = 0; index < requests; ++index) {
    const uint32_t *request = words + kHead + index * kRequest;
    const uint64_t values[] = {
        request[kQueries], request[kKeys],
        (uint64_t{request[kFirstQuery]} << 32) | request[kFirstQuery + 1],
        (uint64_t{request[kFirstKey]} << 32) | request[kFirstKey + 1]};
    line += (index > 0 ? ";" : "") + joined(values, 4);
  }
  trace(line + ")");
}

std::string type_name(int type) {
  static const std::map<int, std::string> names = {
      {0, "float32"}, {1, "float16"}, {2, "int8"},    {3, "int32"},
      {9, "int64"},   {11, "float64"}, {12, "bool"},   {18, "uint64"},
      {27, "bfloat16"}};
  const auto found = names.find(type);
  return found == names.end() ? "type" + std::to_string(type) : found->second;
}

uint32_t cores(int resource) {
  return resource == kCubeCoreResource ? kCubeCores : kVectorCores;
}

} // namespace

int synchronize(const char *with) {
  ++counts[kSynchronisations];
  trace(std::string("wait for ") + with);
  return kOk;
}

extern "C" {

// The device.
int aclrtGetDevice(int32_t *device) {
  *device = 0;
  return kOk;
}
int aclrtGetDeviceCount(uint32_t *count) {
  *count = 8;
  return kOk;
}
const char *aclrtGetSocName() {
  const char *name = getenv("FAKE_SOC");
  return name != nullptr ? name : "Ascend910B2";
}
int rtGetSocVersion(char *version, uint32_t size) {
  snprintf(version, size, "%s", aclrtGetSocName());
  return kOk;
}
int rtGetDeviceInfo(uint32_t, int32_t, int32_t, int64_t *value) {
  *value = kCubeCores;
  return kOk;
}
int aclrtGetResInCurrentThread(int resource, uint32_t *value) {
  *value = cores(resource);
  return kOk;
}
int aclrtGetDeviceResLimit(int32_t, int resource, uint32_t *value) {
  *value = cores(resource);
  return kOk;
}
int aclrtGetStreamResLimit(void *, int resource, uint32_t *value) {
  *value = cores(resource);
  return kOk;
}
int rtGetC2cCtrlAddr(uint64_t *address, uint32_t *size) {
  static char memory[64];
  *address = reinterpret_cast<uint64_t>(memory);
  *size = sizeof(memory);
  return kOk;
}
int aclrtGetRunMode(int *mode) {
  *mode = 1; // host
  return kOk;
}
int aclrtDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 7;
  *greatest = 0;
  return kOk;
}
const char *aclGetRecentErrMsg() { return ""; }

// Contexts, streams, events.
int aclrtCreateContext(void **context, int32_t) {
  *context = handle();
  return kOk;
}
int aclrtGetCurrentContext(void **context) {
  *context = reinterpret_cast<void *>(7);
  return kOk;
}
int aclrtCreateStream(void **stream) {
  *stream = handle();
  return kOk;
}
int aclrtCreateStreamWithConfig(void **stream, uint32_t, uint32_t) {
  *stream = handle();
  return kOk;
}
int aclrtCreateEvent(void **event) {
  *event = handle();
  return kOk;
}
int aclrtCreateEventWithFlag(void **event, uint32_t) {
  *event = handle();
  return kOk;
}
int aclrtCreateEventExWithFlag(void **event, uint32_t) {
  *event = handle();
  return kOk;
}
int aclrtQueryEventStatus(void *, int *status) {
  *status = 1; // complete
  return kOk;
}
int aclrtStreamQuery(void *, int *status) {
  *status = 0; // complete
  return kOk;
}
int aclrtEventElapsedTime(float *milliseconds, void *, void *) {
  *milliseconds = 0;
  return kOk;
}
int aclrtLaunchCallback(void (*callback)(void *), void *argument, int, void *) {
  callback(argument);
  return kOk;
}
// A thread of MindSpore calls this without end. Callbacks run at once, so there
// is nothing to report, and the thread must not take a whole core.
int aclrtProcessReport(int milliseconds) {
  usleep(milliseconds > 0 && milliseconds < 1000 ? 1000 * milliseconds : 10000);
  return kOk;
}

// Memory.
int aclrtGetMemInfo(int, size_t *free_bytes, size_t *total_bytes) {
  *total_bytes = device_bytes();
  *free_bytes = *total_bytes - kReserved - used;
  return kOk;
}
int aclrtMalloc(void **address, size_t size, int) {
  return allocate(address, size);
}
int aclrtMallocAlign32(void **address, size_t size, int) {
  return allocate(address, size);
}
int aclrtMallocHost(void **address, size_t size) {
  size = size == 0 ? 64 : size;
  *address = malloc(size);
  std::lock_guard<std::mutex> lock(mutex);
  pinned[static_cast<const char *>(*address)] = size;
  return *address == nullptr ? kOutOfMemory : kOk;
}
int aclrtFree(void *address) { return release(address); }
int aclrtFreeHost(void *address) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    pinned.erase(static_cast<const char *>(address));
  }
  free(address);
  return kOk;
}
int aclrtReserveMemAddress(void **address, size_t size, size_t, void *,
                           uint64_t) {
  *address = reserve(size);
  return *address == nullptr ? kOutOfMemory : kOk;
}
int aclrtMallocPhysical(void **result, size_t size, const void *, uint64_t) {
  used += size;
  *result = handle();
  return kOk;
}
int aclrtMemcpy(void *target, size_t, const void *source, size_t size,
                int kind) {
  count_copy(target, source, size, kind);
  trace("copy and wait");
  if (size > 0)
    memcpy(target, source, size);
  return kOk;
}
int aclrtMemcpyAsync(void *target, size_t, const void *source, size_t size,
                     int kind, void *) {
  count_copy(target, source, size, kind);
  if (kind == kHostToDevice || kind == kDeviceToHost)
    trace(kind == kDeviceToHost ? "copy to the host" : "copy to the device");
  if (size > 0 && target != nullptr && source != nullptr) {
    trace_mask(source, size);
    trace_flash(source, size);
    memcpy(target, source, size);
  }
  return kOk;
}
int aclrtMemset(void *address, size_t, int32_t value, size_t size) {
  memset(address, value, size);
  return kOk;
}
int aclrtMemsetAsync(void *address, size_t, int32_t value, size_t size,
                     void *) {
  memset(address, value, size);
  return kOk;
}

// Synchronisation, and what was counted so far.
int aclrtSynchronizeStream(void *) { return synchronize("stream"); }
int aclrtSynchronizeStreamWithTimeout(void *, int) {
  return synchronize("stream");
}
int aclrtSynchronizeEvent(void *) { return synchronize("event"); }
int aclrtRecordEvent(void *, void *) {
  trace("record event");
  return kOk;
}
void fake_counts(uint64_t *result) {
  for (int index = 0; index < kNumCounts; ++index)
    result[index] = counts[index];
}

// Tensors, scalars and descriptions that operators take.
size_t aclDataTypeSize(int type) {
  static const size_t sizes[] = {4, 2, 1, 4, 1, 0, 2, 2, 4,
                                 8, 8, 8, 1, 8, 0, 0, 8, 16};
  constexpr int kBfloat16 = 27;
  const int known = sizeof(sizes) / sizeof(sizes[0]);
  return type >= 0 && type < known ? sizes[type] : type == kBfloat16 ? 2 : 4;
}
void *aclCreateTensor(const int64_t *shape, uint64_t rank, int type,
                      const int64_t *, int64_t, int format, const int64_t *,
                      uint64_t, void *) {
  constexpr int kFractalNz = 29;
  return described(type_name(type) + "[" + joined(shape, rank) + "]" +
                   (format == kFractalNz ? "NZ" : ""));
}
void *aclCreateScalar(void *, int type) {
  return described("scalar:" + type_name(type));
}
void *aclCreateIntArray(const int64_t *values, uint64_t number) {
  return described("ints(" + joined(values, number) + ")");
}
void *aclCreateFloatArray(const float *values, uint64_t number) {
  return described("floats(" + joined(values, number) + ")");
}
void *aclCreateBoolArray(const bool *values, uint64_t number) {
  return described("bools(" + joined(values, number) + ")");
}
void *aclCreateTensorList(void *const *tensors, uint64_t number) {
  std::string text;
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (uint64_t index = 0; index < number; ++index)
      text += (index > 0 ? ";" : "") + descriptions[tensors[index]];
  }
  return described("list(" + text + ")");
}
void *aclCreateScalarList(const void *, uint64_t) { return handle(); }
int aclDestroyTensor(const void *tensor) { return forget(tensor); }
int aclDestroyTensorList(const void *list) { return forget(list); }
int aclDestroyScalar(const void *scalar) { return forget(scalar); }
int aclDestroyIntArray(const void *array) { return forget(array); }
void *aclCreateTensorDesc(int, int, const int64_t *, int) { return handle(); }
void *aclCreateDataBuffer(void *, size_t) { return handle(); }
void *aclopCreateAttr() { return handle(); }
void *aclrtAllocatorCreateDesc() { return handle(); }
void *aclmdlCreateDesc() { return handle(); }
void *aclmdlCreateDataset() { return handle(); }

// Operators that CANN compiles itself (TBE).
int aclopCompileAndExecute(const char *name, ...) {
  trace(std::string("aclop ") + name);
  return kOk;
}
int aclopCompileAndExecuteV2(const char *name, ...) {
  trace(std::string("aclop ") + name);
  return kOk;
}
int aclopExecuteV2(const char *name, ...) {
  trace(std::string("aclop ") + name);
  return kOk;
}

// Called by the generated aclnn*GetWorkspaceSize, whose last two arguments
// point to the size of the workspace and to the executor, in variables of the
// caller that are still zero. How many arguments stand before them differs from
// operator to operator, so look for the first two neighbours that are such
// pointers.
//
//   registers: the first six arguments      stack: the others
int fake_workspace_size(const char *name, void **registers, void **stack) {
  constexpr int kArguments = 40;
  constexpr uintptr_t kReach = 1u << 20;
  const auto is_zeroed_variable = [stack](void *pointer) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    const auto above = reinterpret_cast<uintptr_t>(stack);
    if (address <= above || address >= above + kReach || address % 8 != 0)
      return false;
    return *static_cast<uint64_t *>(pointer) == 0;
  };
  const auto argument = [&](int index) {
    return index < 6 ? registers[index] : stack[index - 6];
  };
  for (int index = 0; index + 1 < kArguments; ++index) {
    void *size = argument(index), *executor = argument(index + 1);
    if (!is_zeroed_variable(size) || !is_zeroed_variable(executor) ||
        size == executor)
      continue;
    const auto gap =
        reinterpret_cast<intptr_t>(size) - reinterpret_cast<intptr_t>(executor);
    if (gap > 512 || gap < -512)
      continue;
    *static_cast<void **>(executor) = handle();
    std::string line = name;
    for (int each = 0; each < index; ++each) {
      std::lock_guard<std::mutex> lock(mutex);
      const auto found = descriptions.find(argument(each));
      const auto number = reinterpret_cast<intptr_t>(argument(each));
      line += " " + (found != descriptions.end() ? found->second
                                                 : std::to_string(number));
    }
    trace(line);
    return kOk;
  }
  trace(std::string(name) + " without an executor");
  return kOk;
}

// Kernels.
int rtDevBinaryRegister(const void *, void **result) {
  *result = handle();
  return kOk;
}
int rtRegisterAllKernel(const void *, void **result) {
  *result = handle();
  return kOk;
}

// The checked functions of the C library that CANN brings.
int memcpy_s(void *target, size_t, const void *source, size_t size) {
  memcpy(target, source, size);
  return 0;
}
int memset_s(void *target, size_t, int value, size_t size) {
  memset(target, value, size);
  return 0;
}
int strcpy_s(char *target, size_t, const char *source) {
  strcpy(target, source);
  return 0;
}
int vsnprintf_s(char *target, size_t size, size_t, const char *format,
                va_list values) {
  return vsnprintf(target, size, format, values);
}
int snprintf_s(char *target, size_t size, size_t, const char *format, ...) {
  va_list values;
  va_start(values, format);
  const int written = vsnprintf(target, size, format, values);
  va_end(values);
  return written;
}
int sprintf_s(char *target, size_t size, const char *format, ...) {
  va_list values;
  va_start(values, format);
  const int written = vsnprintf(target, size, format, values);
  va_end(values);
  return written;
}

// Mangled names of C++ functions whose result is larger than a register: the
// caller passes where it goes.
int _ZN2ge15OperatorFactory9IsExistOpEPKc(const char *) { return 1; }
int _ZN2ge15OperatorFactory9IsExistOpERKSs(const void *) { return 1; }
void *_ZN2ge15OperatorFactory14CreateOperatorEPKcS2_(void *result, const char *,
                                                     const char *) {
  return memset(result, 0, 24);
}
void *_ZN2ge15OperatorFactory14CreateOperatorERKSsS2_(void *result,
                                                      const void *,
                                                      const void *) {
  return memset(result, 0, 24);
}

} // extern "C"

// Singletons of which the plugin takes a reference.
namespace ge {
class StatusFactory {
public:
  static StatusFactory *Instance();

private:
  std::map<uint32_t, std::string> errors_;
};
StatusFactory *StatusFactory::Instance() {
  static StatusFactory factory;
  return &factory;
}
} // namespace ge

namespace fe {
class PlatFormInfos {
public:
  bool GetPlatformResWithLock(const std::string &, const std::string &,
                              std::string &);
  uint32_t GetCoreNum() const;
};
bool PlatFormInfos::GetPlatformResWithLock(const std::string &,
                                           const std::string &,
                                           std::string &value) {
  value = std::to_string(kCubeCores);
  return true;
}
uint32_t PlatFormInfos::GetCoreNum() const { return kCubeCores; }

class PlatformInfoManager {
public:
  static PlatformInfoManager &GeInstance();

private:
  char memory_[4096] = {};
};
PlatformInfoManager &PlatformInfoManager::GeInstance() {
  static PlatformInfoManager manager;
  return manager;
}
} // namespace fe

namespace optiling {
class CTilingDataClassFactory {
public:
  static CTilingDataClassFactory &GetInstance();

private:
  char memory_[4096] = {};
};
CTilingDataClassFactory &CTilingDataClassFactory::GetInstance() {
  static CTilingDataClassFactory factory;
  return factory;
}
} // namespace optiling
