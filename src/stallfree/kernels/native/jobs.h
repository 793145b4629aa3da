// What replay.cpp does for queue.cpp, beside its C interface.
#pragma once

#include "pool.h"
#include "replay.h"

namespace stallfree {

// Runs the jobs of different parameters to their ends, all on the pool's threads at once, so that small ones leave no thread
// idle. On an error nothing has been changed. Throws std::bad_alloc.
int32_t replay_all(stallfree_pool* pool, const stallfree_job* jobs, int32_t count);

// Runs a task on so many of the pool's threads, or as many as there are. Callers on several threads take turns.
void run_on(stallfree_pool* pool, Task task, void* context, int64_t participants);

// Keeps the pool until one more stallfree_pool_destroy.
void retain(stallfree_pool* pool);

}  // namespace stallfree
