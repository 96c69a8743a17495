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
metadata:
  labels:
    {{- include "epserve.podLabels" . | nindent 4 }}
  annotations:
    kubectl.kubernetes.io/default-container: worker
spec:
  {{- $sysctls := list (dict "name" "net.ipv4.ip_local_port_range" "value" (printf "%d %d" (int $ports.first) (int $ports.last))) }}
  {{- include "epserve.podHead" (merge (dict "placement" $worker.placement "sysctls" (ternary list $sysctls $host)) .) | nindent 2 }}
  {{- with $worker.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- if $host }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  terminationGracePeriodSeconds: {{ add $worker.drainSeconds 45 }}
  {{- with include "epserve.modelDownload" . | trim }}{{ . | nindent 2 }}{{ end }}
  containers:
    - name: worker
      image: {{ include "epserve.image" .root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      command: [python, -m, {{ .component }}_worker]
      args:
        - --name=$(POD_NAME)
        - --listen=0.0.0.0:9000
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
        - --start-timeout-seconds={{ $worker.startSeconds }}
        - --stop-grace-seconds={{ $worker.drainSeconds }}
        {{- if $token }}
        - --admin-token-file=/etc/epserve/admin-token/admin-token
        {{- end }}
        {{- with include "epserve.flags" $worker.settings | trim }}{{ . | nindent 8 }}{{ end }}
      env:
        {{- if gt (int $worker.nodes) 1 }}
        - name: GROUP_NAME
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/name']"}}
        - name: GROUP_INDEX
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']"}}
        {{- end }}
        {{- include "epserve.env" $worker.env | trim | nindent 8 }}
      ports:
        - {name: grpc, containerPort: 9000}
        - {name: metrics, containerPort: 9100}
        {{- if gt (int $worker.nodes) 1 }}
        - {name: rendezvous, containerPort: 9400}
        {{- end }}
      # Serving once every rank has loaded its part of the model.
      startupProbe:
        grpc: {port: 9000}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add $worker.startSeconds 64) 5 }}
      # Not serving while it drains.
      readinessProbe:
        grpc: {port: 9000}
        periodSeconds: 3
        timeoutSeconds: 3
        failureThreshold: 2
      # Serving as long as the front turns, however busy the ranks are.
      livenessProbe:
        grpc: {port: 9000, service: liveness}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
      lifecycle:
        # SIGTERM drains as well: nothing is lost when no router answers here.
        preStop:
          exec:
            command:
              - sh
              - -c
              - >-
                exec ctl drain "$POD_NAME" --wait --timeout={{ add $worker.drainSeconds 10 }}
                --router={{ include "epserve.name" (dict "root" .root "component" "router") }}:8001
                {{- if $token }} --token-file=/etc/epserve/admin-token/admin-token{{ end }}
      securityContext:
        {{- include "epserve.containerSecurity" (ternary (list "IPC_LOCK") (list) (not (empty $worker.rdma.resource))) | nindent 8 }}
      resources:
        {{- include "epserve.workerResources" $worker | trim | nindent 8 }}
      volumeMounts:
        - name: tmp
          mountPath: /tmp
        - name: shm
          mountPath: /dev/shm
        {{- with include "epserve.modelMount" .root | trim }}{{ . | nindent 8 }}{{ end }}
        {{- if $token }}
        - name: admin-token
          mountPath: /etc/epserve/admin-token
          readOnly: true
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $worker.shmSize }}}
    {{- with include "epserve.modelVolume" . | trim }}{{ . | nindent 4 }}{{ end }}
    {{- if $token }}
    - name: admin-token
      secret: {secretName: {{ $token }}}
    {{- end }}
{{- end -}}

{{/* Requests and limits, with a GPU for each rank and the RDMA devices of the pod. */}}
{{- define "epserve.workerResources" -}}
{{- $resources := deepCopy .resources }}
{{- $devices := dict }}
{{- if eq .device "cuda" }}
{{- $_ := set $devices .gpuResource (toString .ranks) }}
{{- end }}
{{- if .rdma.resource }}
{{- $_ := set $devices .rdma.resource (toString .rdma.count) }}
{{- end }}
requests:
  {{- toYaml (merge dict (default dict $resources.requests) $devices) | nindent 2 }}
{{- with merge dict (default dict $resources.limits) $devices }}
limits:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Spec of a LeaderWorkerSet: groups of pods that live and die together. */}}
{{- define "epserve.groups" -}}
{{- if .withReplicas }}
replicas: {{ .worker.groups }}
{{- end }}
startupPolicy: LeaderCreated
rolloutStrategy:
  type: RollingUpdate
  rollingUpdateConfiguration: {maxSurge: 0, maxUnavailable: 1}
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
