{{/* The checkpoint: where it lies, how it gets there. Where a context is a dict: root, component, pod. */}}

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
{{- if and (eq $model.source "objectStore") (has .component (list "gateway" "prefill" "decode")) }}
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
    {{- include "epserve.containerSecurity" . | nindent 4 }}
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
