/* kvpick/version.h — version of the release this tree becomes. */
#ifndef KVPICK_VERSION_H
#define KVPICK_VERSION_H
#define KVPICK_VERSION "0.1.0"
#endif
