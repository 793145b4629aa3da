// Several calls of the CUDA driver in one call from Python: there, each costs more than what it does.

#include <cstddef>
#include <cstdint>

#include "replay.h"

namespace {

enum Kind : int64_t { kWrite, kWait, kCopy, kLaunch };

constexpr int64_t kMostParameters = 128;
constexpr int64_t kUnknown = 1;  // CUDA_ERROR_INVALID_VALUE

using WriteValue = int (*)(void* stream, uint64_t address, uint32_t value, unsigned flags);
using WaitValue = int (*)(void* stream, uint64_t address, uint32_t value, unsigned flags);
using Copy = int (*)(uint64_t target, uint64_t source, size_t bytes, void* stream);
using LaunchKernel = int (*)(void* function, unsigned x, unsigned y, unsigned z, unsigned block_x, unsigned block_y,
                             unsigned block_z, unsigned shared, void* stream, void** parameters, void** extra);

struct Functions {
    WriteValue write;
    WaitValue wait;
    Copy copy;
    LaunchKernel launch;
};

void* pointer(int64_t word) { return reinterpret_cast<void*>(word); }

// function, programs, threads, shared bytes, stream, number of parameters, parameters of 8 bytes each
int launch(const Functions& functions, const int64_t* words) {
    void* parameters[kMostParameters];
    for (int64_t i = 0; i < words[5]; ++i) parameters[i] = const_cast<int64_t*>(words + 6 + i);
    return functions.launch(pointer(words[0]), static_cast<unsigned>(words[1]), 1, 1, static_cast<unsigned>(words[2]), 1, 1,
                            static_cast<unsigned>(words[3]), pointer(words[4]), parameters, nullptr);
}

}  // namespace

extern "C" {

// Does the calls that `words` describes, in order, until one fails. Returns 0, or the failed call's place in `words` times 65536
// plus the driver's status.
STALLFREE_EXPORT int64_t stallfree_driver_run(const int64_t* words, int64_t count, const void* table) {
    const Functions& functions = *static_cast<const Functions*>(table);
    for (int64_t at = 0; at < count;) {
        const int64_t kind = words[at], left = count - at - 1;
        const int64_t* rest = words + at + 1;
        int64_t status = kUnknown, used = 0;
        if (kind == kWrite && left >= 3) {
            status = functions.write(pointer(rest[0]), static_cast<uint64_t>(rest[1]), static_cast<uint32_t>(rest[2]), 0);
            used = 3;
        } else if (kind == kWait && left >= 3) {  // flags 0: until the value is at least this, modulo 2^32
            status = functions.wait(pointer(rest[0]), static_cast<uint64_t>(rest[1]), static_cast<uint32_t>(rest[2]), 0);
            used = 3;
        } else if (kind == kCopy && left >= 4) {
            status = functions.copy(static_cast<uint64_t>(rest[0]), static_cast<uint64_t>(rest[1]), static_cast<size_t>(rest[2]),
                                    pointer(rest[3]));
            used = 4;
        } else if (kind == kLaunch && left >= 6 && rest[5] >= 0 && rest[5] <= kMostParameters && left >= 6 + rest[5]) {
            status = launch(functions, rest);
            used = 6 + rest[5];
        }
        if (status != 0) return at * 65536 + status;
        at += 1 + used;
    }
    return 0;
}
}
