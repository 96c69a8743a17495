{{/* Parts of a pod that all processes share. Where a context is a dict: root, component. */}}

{{- define "epserve.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
# A checkpoint has thousands of gigabytes: its owners are not changed at each start.
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "epserve.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- with . }}
  add: {{ toJson . }}
  {{- end }}
{{- end -}}

{{/* What stands above the containers. Takes placement besides. */}}
{{- define "epserve.podHead" -}}
serviceAccountName: {{ include "epserve.name" (dict "root" .root "component" (ternary "router" "pods" (eq .component "router"))) }}
automountServiceAccountToken: {{ and (eq .component "router") (eq .root.Values.router.discovery "kubernetes") }}
# Variables named after Services (EPSERVE_...) would be taken for settings.
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- include "epserve.podSecurity" . | nindent 2 }}
  {{- if .sysctls }}
  sysctls:
    {{- toYaml .sysctls | nindent 4 }}
  {{- end }}
{{- with .placement.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .placement.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .placement.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .placement.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* Replicas apart from each other, where there is room. */}}
{{- define "epserve.spread" -}}
topologySpreadConstraints:
  {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - topologyKey: {{ . }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "epserve.selector" $ | nindent 8 }}
  {{- end }}
{{- end -}}

{{/* Folder of the checkpoint as processes see it. */}}
{{- define "epserve.modelPath" -}}
{{- if eq .Values.model.source "image" }}{{ .Values.model.path }}{{ else }}/model{{ end -}}
{{- end -}}

{{- define "epserve.modelMount" -}}
{{- if ne .Values.model.source "image" }}
- name: model
  mountPath: /model
  readOnly: true
  {{- if eq .Values.model.source "pvc" }}
  subPath: {{ .Values.model.path | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* A gateway needs only the small files: its download stays in the pod. */}}
{{- define "epserve.modelVolume" -}}
{{- $model := .root.Values.model }}
{{- if eq $model.source "hostPath" }}
- name: model
  hostPath: {path: {{ $model.path | quote }}, type: Directory}
{{- else if eq $model.source "pvc" }}
- name: model
  persistentVolumeClaim: {claimName: {{ $model.claim }}, readOnly: true}
{{- else if eq $model.source "objectStore" }}
- name: model
  {{- if and $model.objectStore.cacheHostPath (ne .component "gateway") }}
  hostPath: {path: {{ $model.objectStore.cacheHostPath | quote }}, type: Directory}
  {{- else }}
  emptyDir: {sizeLimit: {{ ternary "1Gi" $model.objectStore.sizeLimit (eq .component "gateway") }}}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "epserve.modelDownload" -}}
{{- $model := .root.Values.model }}
{{- if eq $model.source "objectStore" }}
initContainers:
  - name: download
    image: {{ $model.objectStore.image }}
    # Files that are there already, whole, are not loaded again.
    args:
      - copy
      - --transfers=16
      - --multi-thread-streams=8
      - --stats=30s
      - --stats-log-level=NOTICE
      {{- if eq .component "gateway" }}
      - --exclude=*.safetensors
      {{- end }}
      - {{ $model.path | quote }}
      - /model
    env:
      - name: HOME
        value: /tmp
    {{- with $model.objectStore.secret }}
    envFrom:
      - secretRef: {name: {{ . }}}
    {{- end }}
    securityContext:
      {{- include "epserve.containerSecurity" (list) | nindent 6 }}
    resources:
      requests: {cpu: 500m, memory: 512Mi}
      limits: {memory: 2Gi}
    volumeMounts:
      - name: model
        mountPath: /model
      - name: tmp
        mountPath: /tmp
{{- end }}
{{- end -}}
