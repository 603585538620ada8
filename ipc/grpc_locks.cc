/* ipc/grpc_locks.cc - C++ because the library that the core's locks come from is. */
#include <absl/synchronization/mutex.h>

#include "ipc/grpc_locks.h"

extern "C" void kvp_grpc_locks_plain(void)
{
	absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
}
