{{/* Evictions take one pod after the other. Takes root and component. */}}
{{- define "epserve.disruptionBudget" -}}
{{- with .root.Values.disruptionBudgets }}
{{- if .enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "epserve.metadata" $ | nindent 2 }}
spec:
  maxUnavailable: {{ .maxUnavailable }}
  # A pod that is not ready anyway never stands in the way of a node's maintenance.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "epserve.selector" $ | nindent 6 }}
{{- end }}
{{- end }}
{{- end -}}
