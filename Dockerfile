# kvpick in a container: built and run on Debian 12. The packages of both stages are the table of deploy/deps.sh.
#
#   docker build -t registry.example.com/kvpick:0.1.0 .
#   docker run --read-only --tmpfs /run/kvpick:uid=65532,gid=65532,mode=0700 --cap-drop ALL \
#     --security-opt no-new-privileges -p 8092:8092 registry.example.com/kvpick:0.1.0
FROM debian:12-slim AS build
WORKDIR /src
# First what changes rarely.
COPY deploy/deps.sh deploy/deps.sh
RUN deploy/deps.sh build
COPY Makefile LICENSE ./
COPY include include
COPY shm shm
COPY ipc ipc
COPY daemons daemons
COPY bench bench
COPY deploy/systemd deploy/systemd
# Simulated engines and load generator are for tests. Debug information stays in the build stage.
RUN make -s -j"$(nproc)" install DESTDIR=/out \
	&& rm /out/usr/bin/kvpick-sim /out/usr/bin/kvpick-load \
	&& strip --strip-unneeded /out/usr/bin/*

FROM debian:12-slim
COPY deploy/deps.sh /tmp/deps.sh
# Neither shell scripts nor package lists are needed any more; the package manager has nothing to do at run time.
RUN /tmp/deps.sh runtime \
	&& rm -rf /tmp/deps.sh /var/lib/apt/lists/* /var/cache/apt/* \
	&& groupadd --gid 65532 kvpick \
	&& useradd --uid 65532 --gid 65532 --no-create-home --home-dir /run/kvpick --shell /usr/sbin/nologin kvpick \
	&& install -d -o 65532 -g 65532 -m 0700 /run/kvpick
COPY --from=build /out/usr/bin/ /usr/bin/
COPY LICENSE /usr/share/doc/kvpick/LICENSE
# A number: kubelets can't tell whether a name is root.
USER 65532:65532
EXPOSE 8092 9002 9003 9090
# SIGTERM is what asks the supervisor to drain, for at most KVPICK_DRAIN_TIMEOUT_MS: give it longer than that.
STOPSIGNAL SIGTERM
ENTRYPOINT ["kvpick"]
CMD ["run"]
