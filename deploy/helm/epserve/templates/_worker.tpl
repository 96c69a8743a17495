{{/* Worker pods and groups of them. The context of each is a dict: root, component (the role) and
     worker, which is workers.common with the role's own values over it. */}}

{{- define "epserve.worker" -}}
{{- $worker := mustMergeOverwrite (deepCopy .root.Values.workers.common) (index .root.Values.workers .component) }}
{{- toJson $worker }}
{{- end -}}

{{- define "epserve.workerPod" -}}
{{- $worker := .worker }}
{{- $values := .root.Values }}
{{- $token := include "epserve.adminTokenSecret" .root }}
{{- $ports := $values.networkPolicy.kvPorts }}
{{- $host := $worker.rdma.hostNetwork }}
{{- $sysctl := dict "name" "net.ipv4.ip_local_port_range" "value" (printf "%d %d" (int $ports.first) (int $ports.last)) }}
{{- $env := merge (dict) $worker.env (include "epserve.networkEnv" . | fromJson) }}
{{- if gt (int $worker.nodes) 1 }}
{{- range $name, $label := dict "GROUP_NAME" "name" "GROUP_INDEX" "group-index" }}
{{- $path := printf "metadata.labels['leaderworkerset.sigs.k8s.io/%s']" $label }}
{{- $_ := set $env $name (dict "valueFrom" (dict "fieldRef" (dict "fieldPath" $path))) }}
{{- end }}
{{- end }}
{{- $startSeconds := include "epserve.startSeconds" . | int64 }}
{{- $admin := printf "--router=%s%s" (include "epserve.routerAddress" .root) (ternary " --token-file=/etc/epserve/admin-token/admin-token" "" (not (empty $token))) }}
{{- /* A worker is up once it has a partner: until then none of another version goes in its favour.
       One that finds none is given a day; one that cannot load ends by itself. */}}
{{- $me := merge (dict
  "placement" $worker.placement
  "pod" (include "epserve.pod" (list .root $worker.pod) | fromJson)
  "annotations" (dict "kubectl.kubernetes.io/default-container" "worker")
  "sysctls" (ternary list (list $sysctl) $host)
  "env" $env
  "capabilities" (ternary (list "IPC_LOCK") list (not (empty $worker.rdma.resource)))
  "startup" (printf "exec ctl probe pair \"$POD_NAME\" %s" $admin)
  "startSeconds" (add $startSeconds 86400)) . }}
metadata:
  {{- include "epserve.podMetadata" $me | nindent 2 }}
spec:
  {{- include "epserve.podHead" $me | nindent 2 }}
  {{- with $worker.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- if $host }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- if $worker.hostIPC }}
  hostIPC: true
  {{- end }}
  {{- if $worker.hostPID }}
  hostPID: true
  {{- end }}
  terminationGracePeriodSeconds: {{ add $worker.drainSeconds 45 }}
  containers:
    - name: worker
      {{- include "epserve.container" $me | nindent 6 }}
      {{- include "epserve.probes" $me | trim | nindent 6 }}
      command: [python, -m, {{ .component }}_worker]
      args:
        - --name=$(POD_NAME)
        - --listen={{ include "epserve.listen" .root }}:9000
        - --advertise=$(POD_IP)
        {{- include "epserve.observed" .root | nindent 8 }}
        - --model={{ include "epserve.modelPath" .root }}
        - --served-model-name={{ $values.model.servedName }}
        - --device={{ $worker.device }}
        - --ranks={{ $worker.ranks }}
        {{- if gt (int $worker.nodes) 1 }}
        # The group's controller tells each pod its place.
        - --nodes=$(LWS_GROUP_SIZE)
        - --node-rank=$(LWS_WORKER_INDEX)
        - --rendezvous=$(LWS_LEADER_ADDRESS):9400
        - --expert-group=$(GROUP_NAME)-$(GROUP_INDEX)
        {{- end }}
        - --start-timeout-seconds={{ $startSeconds }}
        - --stop-grace-seconds={{ $worker.drainSeconds }}
        {{- if $token }}
        - --admin-token-file=/etc/epserve/admin-token/admin-token
        {{- end }}
        {{- with include "epserve.flags" $worker.settings | trim }}{{ . | nindent 8 }}{{ end }}
      ports:
        - {name: grpc, containerPort: 9000}
        - {name: metrics, containerPort: 9100}
        {{- if gt (int $worker.nodes) 1 }}
        - {name: rendezvous, containerPort: 9400}
        {{- end }}
      lifecycle:
        # SIGTERM drains as well: nothing is lost when no router answers here.
        preStop:
          exec:
            command:
              - sh
              - -c
              - >-
                exec ctl drain "$POD_NAME" --wait --timeout={{ add $worker.drainSeconds 10 }}
                {{ $admin }}
      resources:
        {{- include "epserve.workerResources" . | fromJson | toYaml | nindent 8 }}
      volumeMounts:
        - name: tmp
          mountPath: /tmp
        {{- include "epserve.clusterMount" .root | nindent 8 }}
        {{- if not $worker.hostIPC }}
        - name: shm
          mountPath: /dev/shm
        {{- end }}
        # What was compiled at the first start, for all others.
        - name: cache
          mountPath: /var/cache/epserve
        {{- with include "epserve.modelMount" .root | trim }}{{ . | nindent 8 }}{{ end }}
        {{- if $token }}
        - name: admin-token
          mountPath: /etc/epserve/admin-token
          readOnly: true
        {{- end }}
        {{- with $me.pod.extraVolumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
    {{- with $me.pod.sidecars }}{{ toYaml . | nindent 4 }}{{ end }}
  volumes:
    - name: tmp
      emptyDir: {}
    {{- include "epserve.clusterVolume" .root | nindent 4 }}
    {{- if not $worker.hostIPC }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ include "epserve.shmSize" . }}}
    {{- end }}
    - name: cache
      {{- if $worker.cache.claim }}
      persistentVolumeClaim: {claimName: {{ $worker.cache.claim }}}
      {{- else if $worker.cache.hostPath }}
      hostPath: {path: {{ $worker.cache.hostPath | quote }}, type: Directory}
      {{- else }}
      emptyDir: {}
      {{- end }}
    {{- with include "epserve.modelVolume" . | trim }}{{ . | nindent 4 }}{{ end }}
    {{- if $token }}
    - name: admin-token
      secret: {secretName: {{ $token }}}
    {{- end }}
    {{- with $me.pod.extraVolumes }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end -}}

{{/* How groups are replaced. Where a role has one, another comes up before it goes; with several,
     no more at a time than there are devices for. */}}
{{- define "epserve.rollout" -}}
{{- $surge := toString .worker.surge }}
{{- if eq $surge "auto" }}
{{- $groups := ternary .worker.groups (index .root.Values.autoscaling .component).min .withReplicas }}
{{- $surge = ternary 1 0 (le (int $groups) 1) }}
{{- end }}
{{- printf "{maxSurge: %d, maxUnavailable: %d}" (int $surge) (ternary 0 1 (gt (int $surge) 0)) }}
{{- end -}}

{{/* Spec of a LeaderWorkerSet: groups of pods that live and die together. */}}
{{- define "epserve.groups" -}}
{{- if .withReplicas }}
replicas: {{ .worker.groups }}
{{- end }}
startupPolicy: LeaderCreated
rolloutStrategy:
  type: RollingUpdate
  rollingUpdateConfiguration: {{ include "epserve.rollout" . }}
networkConfig: {subdomainPolicy: UniquePerReplica}
leaderWorkerTemplate:
  size: {{ .worker.nodes }}
  # A rank that is gone takes its EP group with it.
  restartPolicy: RecreateGroupOnPodRestart
  workerTemplate:
    {{- include "epserve.workerPod" . | trim | nindent 4 }}
{{- end -}}

{{/* exclusive-topology of one role's groups, as annotations of a LeaderWorkerSet. */}}
{{- define "epserve.groupAnnotations" -}}
{{- with .worker.exclusiveTopology }}
leaderworkerset.sigs.k8s.io/exclusive-topology: {{ . }}
{{- end }}
{{- end -}}
