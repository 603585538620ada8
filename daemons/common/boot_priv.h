/* daemons/common/boot_priv.h — what supervisor, child and tool agree on; for boot*.c only. */
#ifndef KVP_DAEMONS_BOOT_PRIV_H
#define KVP_DAEMONS_BOOT_PRIV_H

#include "daemons/common/boot.h"

#define KVP_BOOT_MAGIC 0x31544f4f42504b56ULL  /* "VKPBOOT1" */
#define KVP_HELLO_MAGIC 0x314f4c4c4548504bULL /* "KPHELLO1" */

/* Contents of the sealed memory file that a child finds at --boot-fd. Descriptor numbers are the child's. */
struct kvp_boot_desc {
	uint64_t magic;
	uint64_t size; /* of this structure */
	uint64_t region_gen;
	uint64_t lock_dev, lock_ino; /* identity of the lock file */
	int32_t parent;
	uint32_t role, instance, slot, slot_max;
	kvp_owner owner;
	int32_t region_fd, index_fd, config_fd;
	int32_t wake_fd[KVP_SLOT_MAX];
	char run_dir[KVP_BOOT_PATH_MAX];
	char node[40]; /* instance name of the node */
};

/* One message of the control socket; the region's descriptor, opened read-only, travels with it. */
struct kvp_boot_hello {
	uint64_t magic;
	uint64_t size;
	uint64_t region_gen;
	int32_t supervisor;
	uint32_t pad;
};
#endif
