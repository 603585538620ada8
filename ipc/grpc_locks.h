/* ipc/grpc_locks.h - the locks of the gRPC core without their search for cycles.
 *
 * Shape      one call. The core's locks come from a library that may be packaged as a debug build: then every
 *            lock taken while others are held enters a graph of the whole process, under one lock, and a
 *            cycle aborts. That is for whoever develops the core.
 * Truth      the library's; where it is no debug build the call changes nothing.
 * Who        who starts the core, before it does. Any thread, any number of times.
 * Crash      process-local.
 * Proved by  tests/t_grpc_server.c (under load with it), bench/bars_extproc.py (5 % of a stream's time)
 */
#ifndef KVP_IPC_GRPC_LOCKS_H
#define KVP_IPC_GRPC_LOCKS_H

#ifdef __cplusplus
extern "C" {
#endif
void kvp_grpc_locks_plain(void);
#ifdef __cplusplus
}
#endif
#endif
