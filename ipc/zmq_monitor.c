#include "ipc/zmq_monitor.h"

#include <inttypes.h>
#include <kvpick/atomic.h>
#include <kvpick/clock.h>
#include <stdio.h>
#include <string.h>
#include <zmq.h>

void kvp_zmq_monitor_open(struct kvp_zmq_monitor *m, void *zmq, void *of)
{
	static uint64_t serial; /* the library frees names late */
	const int no_linger = 0;
	char addr[64];
	snprintf(addr, sizeof(addr), "inproc://kvp-monitor-%" PRIu64, kvp_faa_rlx_u64(&serial, 1));
	const int events = ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED | ZMQ_EVENT_CONNECT_RETRIED;
	if (zmq_socket_monitor(of, addr, events))
		return;
	m->of = of;
	m->sock = zmq_socket(zmq, ZMQ_PAIR);
	if (m->sock && (zmq_setsockopt(m->sock, ZMQ_LINGER, &no_linger, sizeof(no_linger)) ||
			       zmq_connect(m->sock, addr)))
		kvp_zmq_monitor_close(m);
}

void kvp_zmq_monitor_close(struct kvp_zmq_monitor *m)
{
	if (m->of)
		zmq_socket_monitor(m->of, NULL, 0);
	if (m->sock)
		zmq_close(m->sock);
	m->of = m->sock = NULL;
	m->is_connected = 0;
	m->lost_ns = 0;
}

void kvp_zmq_monitor_read(struct kvp_zmq_monitor *m)
{
	zmq_msg_t msg;
	zmq_msg_init(&msg);
	while (m->sock && zmq_msg_recv(&msg, m->sock, ZMQ_DONTWAIT) >= 0) {
		if (zmq_msg_size(&msg) < 2 || !zmq_msg_more(&msg)) /* the second frame is the address */
			continue;
		uint16_t event;
		memcpy(&event, zmq_msg_data(&msg), sizeof(event));
		m->is_connected = event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED;
		m->handshakes += (uint64_t)m->is_connected;
		m->lost_ns = event == ZMQ_EVENT_DISCONNECTED ? kvp_clock_mono_ns() : 0;
	}
	zmq_msg_close(&msg);
}

int kvp_zmq_monitor_gave_up(const struct kvp_zmq_monitor *m)
{
	return m->lost_ns && kvp_clock_mono_ns() - m->lost_ns >= KVP_ZMQ_GIVEN_UP_MS * UINT64_C(1000000);
}
